"""Prompts and output of the fake engine: four bytes are a token. Pure.

Tokens are four bytes wide, so a token sequence is one flat bytes object. The byte 0xff never occurs
in UTF-8: it pads the last token of a text and starts the tokens of the template, so that two
different histories never give the same tokens. Each message is tokenised by itself, and a reply is
generated in the tokens that it has in the next prompt's history: prompts that extend one another
have tokens that extend one another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from talaria_common.chain import without_volatile_lines
from talaria_common.errors import Rejected
from talaria_instance.engine.fake_schema import check_schema, instance_of
from talaria_instance.engine.protocol import EngineRequest

TOKEN_BYTES: Final = 4

_DEFINE: Final = b"\xffdef"
_CALL: Final = b"\xffcal"
_ARGUMENTS: Final = b"\xffarg"
END: Final = b"\xffend"
_ROLES: Final = {
    role: b"\xff" + role[:3].encode()
    for role in ("system", "developer", "user", "assistant", "tool", "function")
}

UNSUPPORTED: Final = ("logprobs", "top_logprobs", "logit_bias", "allowed_token_ids", "best_of")
"""Parameters that change the answer and that a script cannot honour."""

COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions, as OpenAI documents it."""

_WORDS: Final = re.findall(
    r"\S+",
    "the a one this each small late open quiet plain first next clear warm café river garden "
    "signal engine window letter table stone branch harbour market session token answer question "
    "keeps finds makes holds moves reads turns waits opens joins and then while under over near "
    "across before after again slowly always often there here now with without from",
)

_canonical: Final = msgspec.json.Encoder(order="deterministic")


class _Called(msgspec.Struct):
    name: str
    arguments: Any = ""


class _Call(msgspec.Struct):
    function: _Called


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function


class _Named(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct):
    function: _Named


class _Chat(msgspec.Struct):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedChoice | None = None


class _Completion(msgspec.Struct):
    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[list[Annotated[int, Meta(ge=0, lt=2**24)] | str], Meta(min_length=1)]
    )


class _Limits(msgspec.Struct):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What of the caller's body steers the output."""

    max_tokens: int | None
    min_tokens: int
    ignores_end: bool
    stop: tuple[str, ...]


B = TypeVar("B")
_PARAM: Final = re.compile(r"`\$\.(\w+)")
_MISSING: Final = re.compile(r"required field `(\w+)`$")


def _body_as(kind: type[B], body: Mapping[str, Any]) -> B:
    """The fields of `kind`; Rejected with the param that is wrong."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        found = _PARAM.search(str(error)) or _MISSING.search(str(error))
        raise Rejected(
            "invalid_request", str(error), param=found.group(1) if found else None
        ) from error


# --- prompt -------------------------------------------------------------------------------------


def tokens_of(text: str) -> bytes:
    """The tokens of a text; the last is padded."""
    data = text.encode(errors="replace")
    return data + b"\xff" * (-len(data) % TOKEN_BYTES)


def prompt_tokens(request: EngineRequest) -> bytes:
    """The tokens of a call's whole prompt.

    Raises Rejected for a body that has no sense as a prompt.
    """
    if request.endpoint == "completions":
        return _completion_tokens(_body_as(_Completion, request.body).prompt)
    chat = _body_as(_Chat, request.body)
    tools = request.body.get("tools") or ()
    parts = [_DEFINE + tokens_of(_canonical_text(tool)) for tool in tools]
    parts += [_message_tokens(message) for message in chat.messages]
    return b"".join((*parts, _ROLES["assistant"]))


def _completion_tokens(prompt: str | list[int | str]) -> bytes:
    match prompt:
        case str():
            return tokens_of(prompt)
        case [str() as text]:
            return tokens_of(text)
    ids = [i for i in prompt if isinstance(i, int)]
    if len(ids) < len(prompt):
        raise Rejected("unsupported_parameter", "one prompt a call", param="prompt")
    return b"".join(b"\xff" + i.to_bytes(3, "big") for i in ids)


def _message_tokens(message: _Message) -> bytes:
    content = message.content or ""
    if isinstance(content, list):
        content = "".join(p if isinstance(p, str) else str(p.get("text", "")) for p in content)
    called = b"".join(
        call_tokens(call.function.name, _argument_text(call.function.arguments))
        for call in message.tool_calls or ()
    )
    return _ROLES[message.role] + tokens_of(without_volatile_lines(content)) + called + END


def _argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _canonical_text(arguments)


def _canonical_text(value: Any) -> str:
    try:
        return _canonical.encode(value).decode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise Rejected("invalid_request", str(error), param="tools") from error


def call_tokens(name: str, arguments: str) -> bytes:
    """A tool call's tokens, the same in a reply and in a history."""
    return _CALL + tokens_of(name) + _ARGUMENTS + tokens_of(arguments)


# --- parameters ---------------------------------------------------------------------------------


def parameters(request: EngineRequest) -> Parameters:
    """The output's limits; Rejected for what a script cannot honour."""
    body = request.body
    for name in UNSUPPORTED:
        if body.get(name):
            raise _unsupported(name)
    if body.get("n") not in (None, 1):
        raise _unsupported("n")
    limits = _body_as(_Limits, body)
    default = COMPLETION_MAX_TOKENS if request.endpoint == "completions" else None
    stop = [limits.stop] if isinstance(limits.stop, str) else limits.stop or []
    return Parameters(
        max_tokens=limits.max_completion_tokens or limits.max_tokens or default,
        min_tokens=limits.min_tokens or 0,
        ignores_end=bool(limits.ignore_eos),
        stop=tuple(s for s in stop if s),
    )


def _unsupported(name: str) -> Rejected:
    return Rejected("unsupported_parameter", f"the fake engine has no {name}", param=name)


# --- output -------------------------------------------------------------------------------------


class Script(Protocol):
    """The output of one call, token by token."""

    def token(self, n: int) -> bytes | None:
        """Token `n` (from 0), not padded where it is text; None: the reply has ended."""


class WordScript:
    """Words drawn from the prompt's digest; ends after 24 to 64 tokens unless told not to."""

    def __init__(self, digest: bytes, *, min_tokens: int, ignores_end: bool) -> None:
        self._digest = digest
        self._end = None if ignores_end else max(24 + digest[0] % 41, min_tokens)
        self._data = b""
        self._draws = 0

    def token(self, n: int) -> bytes | None:
        if self._end is not None and n >= self._end:
            return None
        start = n * TOKEN_BYTES
        while len(self._data) < start + TOKEN_BYTES:
            draw = hashlib.blake2b(self._digest + self._draws.to_bytes(4, "big")).digest()
            self._data += b"".join(_WORDS[b % len(_WORDS)].encode() + b" " for b in draw)
            self._draws += 1
        return self._data[start : start + TOKEN_BYTES]


class FixedScript:
    """Given text, then the end; what a grammar admits no more of does not go on."""

    def __init__(self, tokens: bytes) -> None:
        self._tokens = tokens

    def token(self, n: int) -> bytes | None:
        return self._tokens[n * TOKEN_BYTES : (n + 1) * TOKEN_BYTES].rstrip(b"\xff") or None


def script_of(request: EngineRequest, prompt: bytes, limits: Parameters) -> Script:
    """What the engine will say; equal prompts of a model get equal texts.

    Raises Rejected for a schema or a tool choice that cannot be met.
    """
    if request.endpoint == "chat":
        forced = _forced_call(_body_as(_Chat, request.body))
        if forced is not None:
            return FixedScript(call_tokens(*forced))
    text = _formatted_text(request.body.get("response_format"))
    if text is not None:
        return FixedScript(tokens_of(text))
    digest = hashlib.blake2b(request.model.encode() + b"\xff" + prompt, digest_size=16).digest()
    return WordScript(digest, min_tokens=limits.min_tokens, ignores_end=limits.ignores_end)


def _formatted_text(form: Any) -> str | None:
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return '{"answer":"yes"}'
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _instance_text(schema, "response_format")
    raise Rejected("invalid_request", "unknown response_format", param="response_format")


def _forced_call(chat: _Chat) -> tuple[str, str] | None:
    """Name and arguments of the call that the caller insists on."""
    match chat.tool_choice:
        case None | "none" | "auto":
            return None
        case "required":
            wanted = chat.tools[0].function.name if chat.tools else ""
        case _NamedChoice(function=_Named(name=wanted)):
            pass
    for tool in chat.tools or ():
        if tool.function.name == wanted:
            schema = tool.function.parameters or {"type": "object"}
            return wanted, _instance_text(schema, "tools")
    raise Rejected("invalid_request", "tool_choice fits none of the tools", param="tool_choice")


def _instance_text(schema: Any, param: str) -> str:
    try:
        check_schema(schema)
        return msgspec.json.encode(instance_of(schema)).decode()
    except ValueError as error:
        raise Rejected("invalid_request", f"schema: {error}", param=param) from error


# --- taking the output apart --------------------------------------------------------------------


def is_call(token: bytes) -> bool:
    """The token opens a tool call; its name follows."""
    return token == _CALL


def is_arguments(token: bytes) -> bool:
    """The token ends a tool call's name; its arguments follow."""
    return token == _ARGUMENTS


def cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """`text` before the earliest stop string in it; None: there is none."""
    places = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(places)] if places else None


def held_length(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the start of a stop string."""
    return max(
        (n for s in stop for n in range(1, min(len(s) - 1, len(text)) + 1) if text.endswith(s[:n])),
        default=0,
    )
