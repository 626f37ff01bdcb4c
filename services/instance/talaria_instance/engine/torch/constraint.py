"""Output that must fit a grammar: JSON schemas and forced tool calls, by llguidance. Pure.

A Grammar is compiled once, when a call is prepared, and is shared; a Constraint is one sequence's
place in it. Masks hold 32 tokens a word, lowest bit first, over the model's whole vocabulary:
ids that only pad it are never allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from talaria_common.errors import Rejected, Unavailable
from talaria_instance.engine.torch.schema import workable
from talaria_instance.engine.torch.tool_parser import OPEN

Mask = NDArray[np.uint32]

# One fixed form, the one that json.dumps and chat templates write: output is short, it ends, and
# it tokenises as the same text in the next prompt does.
_JSON_FORM: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


class Grammar(msgspec.Struct, frozen=True):
    """What an output may be; `prefix` is text in front of it that the prompt ends with."""

    matcher: Any
    """An LLMatcher at its start, never advanced."""
    prefix: str = ""


class Constraint:
    """One sequence's place in a grammar; used by one thread at a time."""

    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._words = (vocab_size + 31) // 32

    def mask(self) -> Mask:
        """Tokens allowed next, uint32 [ceil(vocab / 32)]; end tokens only where the text may end."""
        mask = np.zeros((1, self._words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, mask)
        self._check()
        row: Mask = mask[0].view(np.uint32)
        return row

    def accept(self, token: int) -> bool:
        """Advance by a token; True when nothing may follow. Raises Unavailable `model_failed`."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise Unavailable("model_failed", f"constrained decoding stopped: {reason}")


class Grammars:
    """Compiles grammars for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def of_response_format(self, value: Mapping[str, Any] | None) -> Grammar | None:
        """Grammar of a caller's response_format; None: anything goes. Raises Rejected."""
        match value:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                schema = _ANY_OBJECT
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
                pass
            case _:
                raise Rejected(
                    "invalid_request",
                    "response_format must be text, json_object, or json_schema with a schema",
                    param="response_format",
                )
        return Grammar(self._compile(_lark_json("start", schema), "response_format"))

    def of_tool_choice(
        self, choice: Any, tools: Sequence[Mapping[str, Any]] | None
    ) -> Grammar | None:
        """Grammar of the call that the caller insists on; None: the model chooses. Raises Rejected.

        The wrapper of the Hermes form is part of the prompt as far as it is known beforehand, so
        that a reply and its rendering in the next prompt have the same tokens.
        """
        if choice in (None, "none", "auto"):
            return None
        functions = [tool["function"] for tool in tools or ()]
        if isinstance(choice, dict):
            wanted = (choice.get("function") or {}).get("name")
            functions = [f for f in functions if f["name"] == wanted][:1]
        elif choice != "required":
            functions = []
        if not functions:
            raise Rejected("invalid_request", "tool_choice fits no tool", param="tool_choice")
        heads = [f'\n{{"name": {_quoted(f["name"])}, "arguments":' for f in functions]
        known = heads[0] if len(heads) == 1 else ""
        rules = [
            f"call{n}: {json.dumps(head.removeprefix(known) + ' ')} arguments{n} {json.dumps('}')}"
            for n, head in enumerate(heads)
        ]
        rules += [
            _lark_json(f"arguments{n}", _parameters(function))
            for n, function in enumerate(functions)
        ]
        start = "start: " + " | ".join(f"call{n}" for n in range(len(heads)))
        return Grammar(self._compile("\n".join((start, *rules)), "tools"), OPEN + known)

    def _compile(self, lark: str, param: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().partition("\n")[0]
            raise Rejected(
                "invalid_request", f"{param}: cannot follow schema: {reason}", param=param
            )
        return matcher


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters") or _ANY_OBJECT
    # Arguments are an object whatever a careless schema leaves out.
    return schema if "type" in schema or "$ref" in schema else {**schema, "type": "object"}


def _lark_json(rule: str, schema: Mapping[str, Any]) -> str:
    return f"{rule}: %json {json.dumps({**workable(schema), 'x-guidance': _JSON_FORM})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
