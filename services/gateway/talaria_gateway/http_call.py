"""A call whose tokens come here and go to an HTTP client. IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from talaria_common import wire
from talaria_common.bus import Msg, Subscription
from talaria_common.errors import TalariaError, Unavailable
from talaria_common.wire import Accepted, CallKey, Delta, Ended, Granted
from talaria_gateway.account import Ask
from talaria_gateway.attempt import Attempt
from talaria_gateway.call import Call
from talaria_gateway.outbox import Failed, Outbox, Started
from talaria_gateway.retry import RetryReason

if TYPE_CHECKING:
    from talaria_gateway.calls import Calls


class HttpCall(Call):
    """Puts into `outbox`: Started at most once and first, deltas, then Ended or Failed."""

    def __init__(self, calls: Calls, ask: Ask) -> None:
        super().__init__(calls, ask)
        self.outbox = Outbox()
        self._inbox = self._context.bus.new_inbox()
        self._subscription: Subscription | None = None
        self._is_started = False
        self._ended_s: float | None = None

    def deliver(self) -> None:
        """The last bytes are about to go out: settle a finished call."""
        if self._ended_s is not None:
            self.tally.deliver_s = self._now_s() - self._ended_s
            self.settle()

    def _run_fields(self, key: CallKey) -> dict[str, Any]:
        return {"inbox": f"{self._inbox}.{key.attempt}"}

    def _silent_s(self, attempt: Attempt, now_s: float) -> float:
        return now_s - attempt.heard_s

    async def _on_granted(self, granted: Granted) -> None:
        if self._subscription is None:
            self._subscription = await self._context.bus.listen(self._inbox, self._hear)

    def _on_accepted(self, attempt: Attempt) -> None:
        if not self._is_started:
            self._is_started = True
            self.outbox.put(Started(attempt.granted))

    async def _after_no_answer(self, attempt: Attempt) -> Accepted | RetryReason:
        return RetryReason.NO_ANSWER

    def _on_finished(self, ended: Ended) -> None:
        self._ended_s = self._now_s()
        self.outbox.put(ended)

    def _on_failed(self, error: TalariaError) -> None:
        self.outbox.put(Failed(error))

    async def _close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _hear(self, message: Msg) -> None:
        if message.is_no_responders:
            return
        news = wire.decode(wire.STREAM, message.payload)
        if news is None:
            self._calls.unreadable()
        elif self._take(news) and isinstance(news, Delta):
            self.outbox.put(news, len(message.payload))
            if self.outbox.nbytes > self._config.reader_bytes_max:
                limit = self._config.reader_bytes_max
                self.stop(Unavailable("connection_lost", f"the reader is {limit} bytes behind"))
