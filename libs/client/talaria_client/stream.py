"""One call's messages in the caller's inbox: which count, and what they mean. Pure.

    CallStarted ─▶ (Working)* ─▶ (Delta)* ─▶ Ended

The call may be placed again before its first token, so messages of several attempts can come. The
caller keeps to the attempt of its first token. Instances number all messages of an attempt from
1; the gateway's own (CallStarted, Working "placing", Ended with an error) have no number.
"""

from __future__ import annotations

from talaria_client.types import Chunk
from talaria_common.errors import TalariaError, Unavailable, from_code
from talaria_common.wire import (
    CallStarted,
    Delta,
    Ended,
    EndReason,
    PublicMessage,
    Working,
)


class CallStream:
    """Applies messages in order; each gives a chunk, nothing, or the error that ends the call."""

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.is_over = False
        """The call has ended on its own; else whoever stops listening has to cancel it."""
        self._attempt: int | None = None
        self._next_seq: dict[int, int] = {}
        self._session = ""
        self._instance = ""

    def apply(self, message: PublicMessage) -> Chunk | None:
        """The chunk in a message, if it has one; raises TalariaError when the call has failed."""
        match message:
            case CallStarted():
                self._session, self._instance = message.session, message.instance
                return None
            case Working(state="placing"):
                return None
            case Working():
                if self._is_ours(message.key.attempt):
                    self._count(message.key.attempt, message.seq)
                return None
            case Delta():
                return self._delta(message)
            case Ended():
                return self._ended(message)

    def _is_ours(self, attempt: int) -> bool:
        return self._attempt is None or self._attempt == attempt

    def _count(self, attempt: int, seq: int) -> bool:
        """The message is news; raises when some before it are missing."""
        wanted = self._next_seq.get(attempt, 1)
        if seq > wanted:
            raise Unavailable("connection_lost", f"messages {wanted} to {seq - 1} were lost")
        if seq == wanted:
            self._next_seq[attempt] = seq + 1
        return seq == wanted

    def _delta(self, delta: Delta) -> Chunk | None:
        if not self._is_ours(delta.key.attempt) or not self._count(delta.key.attempt, delta.seq):
            return None
        self._attempt = delta.key.attempt
        return self._chunk(Chunk(text=delta.text, tool_calls=delta.tool_calls, tokens=delta.tokens))

    def _ended(self, ended: Ended) -> Chunk | None:
        if not self._is_ours(ended.key.attempt):
            return None
        if ended.reason is EndReason.FINISHED:
            if not self._count(ended.key.attempt, ended.seq):
                return None
            self.is_over = True
            return self._chunk(
                Chunk(finish_reason=ended.finish_reason or "stop", usage=ended.usage)
            )
        if ended.error is None and self._attempt is None:
            return None  # an attempt was stopped before its first token: the call goes on
        self.is_over = True
        raise _error(ended)

    def _chunk(self, chunk: Chunk) -> Chunk:
        return Chunk(
            text=chunk.text,
            tool_calls=chunk.tool_calls,
            tokens=chunk.tokens,
            finish_reason=chunk.finish_reason,
            usage=chunk.usage,
            call_id=self.call_id,
            session=self._session,
            instance=self._instance,
        )


def _error(ended: Ended) -> TalariaError:
    info = ended.error
    if info is not None:
        return from_code(info.code, info.detail, param=info.param, retry_after_s=info.retry_after_s)
    if ended.reason is EndReason.CANCELLED:
        return from_code("cancelled", "the call was cancelled")
    return Unavailable("instance_lost", f"the call has ended: {ended.reason}")
