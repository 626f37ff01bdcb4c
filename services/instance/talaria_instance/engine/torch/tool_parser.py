"""Takes tool calls in Hermes form out of a stream of text. Pure.

    text ──<tool_call>──▶ head ──{"name": "f", "arguments": ▶ arguments ──last }──▶ tail ──▶ text
                           │ not a call
                           └──────────────▶ text, the marker included: nothing is lost

Arguments stream as they come. A call whose keys come in another order is read whole. However the
text is split into pushes, the pieces join to the same text and the same calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from talaria_common.wire import ToolDelta

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.S
)
_TAIL: Final = re.compile(r"\s*\}?\s*")
_json: Final = json.JSONDecoder()


class Parsed(msgspec.Struct, frozen=True):
    """What is certain after a push: content, and at most one piece of each tool call."""

    text: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()


class ToolCallParser:
    """State of one output. `new_id` gives each call its id."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._pending = ""
        self._opening = ""
        """The marker of the open call with the white space that belongs to it."""
        self._is_after_call = False
        """Nothing but white space has come since the last call."""
        self._nesting: list[str] = []
        self._is_escaped = False
        self._text: list[str] = []
        self._deltas: dict[int, ToolDelta] = {}
        self.calls_begun = 0
        self.calls_whole = 0

    def push(self, text: str) -> Parsed:
        """Take more of the output."""
        self._pending += text
        return self._advance(is_last=False)

    def finish(self) -> Parsed:
        """The output is over: what was held back is text, or framing, or the end of a call."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> Parsed:
        steps: dict[str, Callable[[bool], bool]] = {
            "text": self._in_text,
            "head": self._in_head,
            "arguments": self._in_arguments,
            "tail": self._in_tail,
        }
        while steps[self._state](is_last):
            pass
        parsed = Parsed("".join(self._text), tuple(self._deltas.values()))
        self._text, self._deltas = [], {}
        return parsed

    # Each step takes what is certain from `_pending` and says whether another state goes on.

    def _in_text(self, is_last: bool) -> bool:
        at = self._pending.find(OPEN)
        if at >= 0:
            before = self._pending[:at]
            kept = before.removesuffix("\n")
            if self._is_after_call and not before.strip():
                kept = ""
            self._say(kept)
            self._opening = before[len(kept) :] + OPEN
            self._pending = self._pending[at + len(OPEN) :]
            self._state = "head"
            return True
        held = 0 if is_last else max(held_length(self._pending, m) for m in (OPEN, "\n" + OPEN))
        certain = self._pending[: len(self._pending) - held]
        if self._is_after_call and not certain.strip():
            if is_last:
                self._pending = ""
            return False
        self._say(certain)
        self._pending = self._pending[len(certain) :]
        return False

    def _in_head(self, is_last: bool) -> bool:
        head = _HEAD.match(self._pending)
        name = _string(head.group(1)) if head else None
        if head and name is not None:
            self._begin(name)
            self._pending = self._pending[head.end() :]
            self._nesting, self._is_escaped = [], False
            self._state = "arguments"
            return True
        body = self._pending.lstrip()
        if body and not body.startswith("{"):
            return self._give_up(0)
        if not body and not is_last:
            return False
        return self._whole_call(is_last)

    def _whole_call(self, is_last: bool) -> bool:
        """Read a call that is not in the usual order, once its end is there."""
        start = len(self._pending) - len(self._pending.lstrip())
        first = at = self._pending.find(CLOSE)
        while at >= 0:
            try:
                value, end = _json.raw_decode(self._pending[:at], start)
            except json.JSONDecodeError as error:
                if error.msg.startswith("Unterminated string"):
                    at = self._pending.find(CLOSE, at + 1)
                    continue
                return self._give_up(first + len(CLOSE))
            except RecursionError:
                return self._give_up(first + len(CLOSE))
            if self._pending[end:at].strip() or not self._emit_whole(value):
                return self._give_up(first + len(CLOSE))
            self._pending = self._pending[at + len(CLOSE) :]
            self._end_call()
            return True
        if not is_last:
            return False
        try:
            value = json.loads(self._pending)
        except (ValueError, RecursionError):
            value = None
        if not self._emit_whole(value):
            return self._give_up(len(self._pending))
        self._pending = ""
        self._end_call()
        return True

    def _emit_whole(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        arguments = value.get("arguments")
        if arguments is None:
            arguments = {}
        self._begin(value["name"])
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        self._argue(text)
        return True

    def _in_arguments(self, is_last: bool) -> bool:
        """Pass arguments on up to the brace that ends them, or the marker if it comes before."""
        pending = self._pending
        at = 0
        while at < len(pending):
            char = pending[at]
            # Neither of these can stand here in JSON, so the marker ends arguments that are broken.
            marker = "\n" + CLOSE if self._is_in_string() else CLOSE
            if char == marker[0] and not self._is_escaped:
                if pending.startswith(marker, at):
                    return self._close_arguments(at, at + len(marker))
                if not is_last and marker.startswith(pending[at:]):
                    break
            at += 1
            if self._scan(char):
                return self._close_arguments(at, at, "tail")
        self._argue(pending[:at])
        self._pending = pending[at:]
        return False

    def _close_arguments(
        self, end: int, resume: int, state: Literal["text", "tail"] = "text"
    ) -> bool:
        self._argue(self._pending[:end])
        self._pending = self._pending[resume:]
        if state == "text":
            self._end_call()
        self._state = state
        return True

    def _is_in_string(self) -> bool:
        return bool(self._nesting) and self._nesting[-1] == '"'

    def _scan(self, char: str) -> bool:
        """Follow strings and brackets; True: the outermost bracket has closed."""
        if self._is_in_string():
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._nesting.pop()
        elif char in '{["':
            self._nesting.append(char)
        elif char in "}]" and self._nesting:
            self._nesting.pop()
        return not self._nesting

    def _in_tail(self, is_last: bool) -> bool:
        framing = _TAIL.match(self._pending)
        rest = self._pending[framing.end() :] if framing else self._pending
        if not is_last and rest != CLOSE and CLOSE.startswith(rest):
            return False
        self._end_call()
        is_framing = is_last and CLOSE.startswith(rest)
        self._pending = "" if is_framing else rest.removeprefix(CLOSE)
        return True

    # --- output -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._is_after_call = False

    def _begin(self, name: str) -> None:
        index = self.calls_begun
        self.calls_begun += 1
        self._deltas[index] = ToolDelta(index=index, id=self._new_id(), name=name)

    def _argue(self, text: str) -> None:
        index = self.calls_begun - 1
        before = self._deltas.get(index, ToolDelta(index=index))
        if text:
            joined = before.arguments + text
            self._deltas[index] = msgspec.structs.replace(before, arguments=joined)

    def _end_call(self) -> None:
        self.calls_whole += 1
        self._is_after_call = True
        self._state = "text"

    def _give_up(self, taken: int) -> bool:
        """Not a call: the marker and `taken` characters after it are text."""
        self._say(self._opening + self._pending[:taken])
        self._pending = self._pending[taken:]
        self._state = "text"
        return True


def held_length(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _string(quoted: str) -> str | None:
    try:
        value = json.loads(quoted)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
