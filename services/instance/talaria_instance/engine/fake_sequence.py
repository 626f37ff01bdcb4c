"""One call inside the fake engine: its progress, and its output on the way to the sink. Pure."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

import msgspec

from talaria_common.wire import ToolDelta
from talaria_instance.engine.fake_kv import extend_hashes
from talaria_instance.engine.fake_text import (
    END,
    TOKEN_BYTES,
    Parameters,
    Script,
    cut_at_stop,
    held_length,
    is_arguments,
    is_call,
)
from talaria_instance.engine.protocol import EngineCall, FinishReason, Sink


class FakePayload(msgspec.Struct, frozen=True):
    """What `prepare` found out about a call."""

    tokens: bytes
    root: bytes
    hashes: tuple[bytes, ...]
    limits: Parameters
    script: Script
    session: str
    tool_call_id: str
    is_faulty: bool


@dataclass(eq=False)
class FakeSequence:
    """Progress of an admitted call.

    `tokens` are the prompt and what was generated; the first `computed` have KV, and `hashes` names
    the full blocks among those.
    """

    call: EngineCall
    payload: FakePayload
    tokens: bytearray = field(init=False)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    generated: int = 0
    is_started: bool = False
    """It has its blocks."""
    is_offloaded: bool = False
    """Paused: its KV is on the host alone."""
    is_aborting: bool = False
    is_over: bool = False
    _decoder: codecs.IncrementalDecoder = field(init=False)
    _held: str = ""
    _unsent: int = 0
    _name: bytearray | None = None
    """Of the tool call whose name is being generated."""
    _is_call: bool = False

    def __post_init__(self) -> None:
        self.tokens = bytearray(self.payload.tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    @property
    def remaining_prefill(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, self.call.prompt_tokens - self.computed)

    def compute(self, count: int, block_tokens: int) -> list[bytes]:
        """Give the next `count` tokens KV; returns the hashes of the blocks that this filled."""
        self.computed += count
        known = len(self.hashes)
        full = self.computed // block_tokens
        extend_hashes(self.payload.root, self.hashes, self.tokens, full, block_tokens)
        return self.hashes[known:]

    def generate(self, sink: Sink) -> FinishReason | None:
        """Emit one more token; the reason if it was the last."""
        token = self.payload.script.token(self.generated)
        self.generated += 1
        self._unsent += 1
        self.tokens += (END if token is None else token).ljust(TOKEN_BYTES, b"\xff")
        if token is None:
            self._emit(sink, self._held)
            return "tool_calls" if self._is_call else "stop"
        if self._add(token, sink):
            return "stop"
        if self.generated >= self.call.max_tokens:
            self._emit(sink, self._held)
            return "length"
        return None

    def _add(self, token: bytes, sink: Sink) -> bool:
        """Pass a token on as text or as a piece of a tool call; True at a stop string."""
        if is_call(token):
            self._name, self._is_call = bytearray(), True
        elif is_arguments(token) and self._name is not None:
            first = ToolDelta(index=0, id=self.payload.tool_call_id, name=self._name.decode())
            self._name = None
            self._send(sink, "", (first,))
        elif self._name is not None:
            self._name += token
        elif self._is_call:
            if piece := self._decoder.decode(token):
                self._send(sink, "", (ToolDelta(index=0, arguments=piece),))
        else:
            return self._add_text(self._decoder.decode(token), sink)
        return False

    def _add_text(self, piece: str, sink: Sink) -> bool:
        limits = self.payload.limits
        text = self._held + piece
        stop = limits.stop if self.generated > limits.min_tokens else ()
        cut = cut_at_stop(text, stop)
        if cut is not None:
            self._emit(sink, cut)
            return True
        keep = held_length(text, stop)
        self._held = text[len(text) - keep :]
        self._emit(sink, text[: len(text) - keep])
        return False

    def _emit(self, sink: Sink, text: str) -> None:
        if text:
            self._send(sink, text, ())

    def _send(self, sink: Sink, text: str, tool_calls: tuple[ToolDelta, ...]) -> None:
        sink.text(self.call.key, text, tool_calls, self._unsent)
        self._unsent = 0
