"""What a call may ask for: form and range of every field that matters. Pure.

Refusals name the field in `param`. Fields that nobody here knows pass through to the engine.
A field that we know and cannot honour is `unsupported_parameter`, unless its value asks for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from talaria_common import chain
from talaria_common.errors import Rejected
from talaria_common.wire import Endpoint, Link
from talaria_gateway.messages import check_messages, invalid, unsupported
from talaria_gateway.tools import check_response_format, check_tools

TOKENS_MAX: Final = 1_000_000
STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256
MODEL_CHARS_MAX: Final = 200
VOLATILE_MARK: Final = b"x-anthropic-billing-header:"

Check = Callable[[str, Any], None]


class CheckedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose form is right."""

    endpoint: Endpoint
    model: str
    is_stream: bool
    includes_usage: bool
    """The caller wants a usage chunk at the end of its stream."""
    max_tokens: int
    """The caller's limit; 0: none stated."""
    messages: list[dict[str, Any]]
    """Of the chat; for completions one pseudo message."""
    body: dict[str, Any]
    raw: bytes
    """The body for the engine: as it came, or encoded again where it had to be cleaned."""

    def links(self, tenant: str) -> list[Link]:
        """The message chain of the prompt (protocols 5)."""
        options = self.body.get("chat_template_kwargs")
        root = chain.root(tenant, self.model, self.body.get("tools"), options)
        return chain.links(root, self.messages)

    def without_parsed(self) -> CheckedCall:
        """What is kept while the call lives: the parsed body takes several times the raw one."""
        return msgspec.structs.replace(self, messages=[], body={})


def check(
    endpoint: Endpoint, body: dict[str, Any], raw: bytes, *, messages_max: int = 10_000
) -> CheckedCall:
    """The checked call; raises Rejected that names the field. `body` is cleaned in place."""
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MODEL_CHARS_MAX:
        raise invalid("model", f"must be a string of 1 to {MODEL_CHARS_MAX} characters")
    for name, rule in _RULES.items():
        value = body.get(name)
        if value is not None:
            rule(name, value)
    is_cleaned = False
    if endpoint == "chat":
        messages = check_messages(body.get("messages"), messages_max)
        is_cleaned = _repair_arguments(messages) or is_cleaned
        check_tools(body)
        check_response_format(body)
    else:
        is_cleaned = _one_prompt(body)
        messages = [{"role": "prompt", "content": body["prompt"]}]
    if VOLATILE_MARK in raw:
        is_cleaned = _drop_volatile_lines(messages) or is_cleaned
    options = body.get("stream_options") or {}
    return CheckedCall(
        endpoint=endpoint,
        model=model,
        is_stream=bool(body.get("stream")),
        includes_usage=bool(options.get("include_usage")),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens") or 0,
        messages=messages,
        body=body,
        raw=msgspec.json.encode(body) if is_cleaned else raw,
    )


# --- rules of single fields -----------------------------------------------------------------------


def _number(low: float, high: float, *, above_low: bool = False) -> Check:
    wanted = f"must be a number {'above' if above_low else 'from'} {low:g} to {high:g}"

    def rule(name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise invalid(name, wanted)
        if above_low and value == low:
            raise invalid(name, wanted)

    return rule


def _integer(low: int, high: int) -> Check:
    def rule(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"must be an integer from {low} to {high}")

    return rule


def _is_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, "must be true or false")


def _only(*neutral: Any) -> Check:
    """Values that ask for nothing are taken (null always is), all others are not supported."""

    def rule(name: str, value: Any) -> None:
        if not any(type(value) is type(other) and value == other for other in neutral):
            raise unsupported(name)

    return rule


def _is_stop(name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise invalid(name, f"must be a string or a list of at most {STOPS_MAX} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise invalid(name, f"must hold strings of 1 to {STOP_CHARS_MAX} characters")


def _is_stream_options(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object")
    if not isinstance(value.get("include_usage", False), bool | None):
        raise invalid(f"{name}.include_usage", "must be true or false")


_RULES: Final[Mapping[str, Check]] = {
    "max_tokens": _integer(1, TOKENS_MAX),
    "max_completion_tokens": _integer(1, TOKENS_MAX),
    "min_tokens": _integer(0, TOKENS_MAX),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above_low=True),
    "min_p": _number(0, 1),
    "top_k": _integer(-1, TOKENS_MAX),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": _is_stop,
    "stream": _is_bool,
    "stream_options": _is_stream_options,
    "ignore_eos": _is_bool,
    "parallel_tool_calls": _is_bool,
    "n": _only(1),
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
    "logprobs": _only(False, 0),
    "top_logprobs": _only(0),
    "prompt_logprobs": _only(0),
    "logit_bias": _only({}),
    "allowed_token_ids": _only([]),
    "audio": _only(),
    "modalities": _only(["text"], []),
    "functions": _only([]),
    "function_call": _only("none"),
    "presence_penalty": _only(0, 0.0),
    "frequency_penalty": _only(0, 0.0),
    "repetition_penalty": _only(1, 1.0),
}


# --- cleaning -------------------------------------------------------------------------------------


def _one_prompt(body: dict[str, Any]) -> bool:
    """Check `prompt`; a list of one string becomes the string."""
    prompt = body.get("prompt")
    is_listed = isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str)
    if is_listed:
        body["prompt"] = prompt = body["prompt"][0]
    if isinstance(prompt, list) and prompt:
        raise Rejected(
            "unsupported_parameter",
            "prompt must be one string; several prompts and token ids are not supported",
            param="prompt",
        )
    if not isinstance(prompt, str) or not prompt:
        raise invalid("prompt", "must be a string that is not empty")
    return is_listed


def _repair_arguments(messages: list[dict[str, Any]]) -> bool:
    """Write `{}` for the empty arguments that some clients send for tools without parameters."""
    repaired = False
    for message in messages:
        for call in message.get("tool_calls") or ():
            if not call["function"].get("arguments"):
                call["function"]["arguments"] = "{}"
                repaired = True
    return repaired


def _drop_volatile_lines(messages: list[dict[str, Any]]) -> bool:
    """Take lines that harnesses change with every call out of system texts."""
    dropped = False
    for message in messages:
        if message["role"] not in {"system", "developer"}:
            continue
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = chain.without_volatile_lines(content)
            dropped = True
        for part in content if isinstance(content, list) else ():
            part["text"] = chain.without_volatile_lines(part["text"])
            dropped = True
    return dropped
