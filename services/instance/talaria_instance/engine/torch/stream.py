"""One call's output on its way to the sink: in order, coalesced. IO (through the sink)."""

from __future__ import annotations

from typing import Final

from talaria_common.wire import CallKey, ToolDelta
from talaria_instance.engine.protocol import FinishReason, Sink
from talaria_instance.engine.torch.text import Piece

# One message per token costs the bus more than it gives a reader: protocols, tokens (10-20 ms).
COALESCE_S: Final = 0.015


class CallStream:
    """Output of one call that the sink has not had yet."""

    def __init__(self, key: CallKey, sink: Sink) -> None:
        self._key = key
        self._sink = sink
        self._text = ""
        self._tool_calls: list[ToolDelta] = []
        self._tokens = 0
        self._sent_s = float("-inf")
        self._is_restored = False
        self.has_begun = False
        """The first token has been announced."""
        self.is_over = False

    def restored(self, seconds: float, tokens: int) -> None:
        """The prompt's KV came from the host; later restores of a resumed call are not announced."""
        if not self._is_restored and not self.has_begun:
            self._is_restored = True
            self._sink.restored(self._key, seconds, tokens)

    def begin(self, cached_tokens: int) -> None:
        """The prefill is done; idempotent."""
        if not self.has_begun:
            self.has_begun = True
            self._sink.first_token(self._key, cached_tokens)

    def push(self, piece: Piece, tokens: int, now_s: float) -> None:
        """Take output; passed on at once if nothing was within the coalescing time."""
        self._text += piece.text
        self._tool_calls += piece.tool_calls
        self._tokens += tokens
        if now_s - self._sent_s >= COALESCE_S and (self._text or self._tool_calls):
            self._sent_s = now_s
            self.flush()

    def flush(self) -> None:
        """Pass on what is there."""
        if self._text or self._tool_calls:
            self._sink.text(self._key, self._text, tuple(self._tool_calls), self._tokens)
            self._text, self._tool_calls, self._tokens = "", [], 0

    def end(self, finish: FinishReason | None, failed: str | None, tokens: int) -> None:
        """The last word; what is still held goes out first, unless the call was aborted."""
        if self.is_over:
            return
        self.is_over = True
        if finish or failed:
            self.flush()
        self._sink.ended(self._key, finish, failed, tokens)
