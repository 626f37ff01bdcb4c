"""A call whose tokens go straight from the instance to a NATS caller's inbox. IO."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from talaria_common import subjects, wire
from talaria_common.bus import NoResponders, RequestTimeout
from talaria_common.errors import TalariaError, Unavailable
from talaria_common.wire import (
    Accepted,
    CallKey,
    CallStarted,
    Ended,
    EndReason,
    ErrorInfo,
    FirstToken,
    Granted,
    Message,
    Notice,
    Withdraw,
    Working,
)
from talaria_gateway.account import CANCELLED, Ask
from talaria_gateway.attempt import Attempt
from talaria_gateway.call import Call
from talaria_gateway.retry import RetryReason

if TYPE_CHECKING:
    from talaria_gateway.calls import Calls

LIFE_EVERY_S: Final = 0.9
WITHDRAW_EVERY_S: Final = 0.5
WITHDRAW_S: Final = 3.0


class NatsCall(Call):
    """Publishes CallStarted, signs of life until acceptance, and the end of a call that fails here."""

    def __init__(self, calls: Calls, ask: Ask, inbox: str) -> None:
        super().__init__(calls, ask)
        self._inbox = inbox
        self._is_told = False

    def start(self) -> None:
        super().start()
        self._calls.background(self._show_life())

    def hear(self, notice: Notice) -> None:
        """What the instance tells about the attempt whose tokens go elsewhere."""
        attempt = self._attempt
        if attempt is None or notice.key != attempt.key:
            return
        match notice:
            case FirstToken():
                self._note_token(attempt)
            case Ended():
                self._accept(attempt)
                self._is_told = True
                attempt.end(notice)

    def _run_fields(self, key: CallKey) -> dict[str, Any]:
        return {
            "inbox": self._inbox,
            "encoding": "json",
            "notify": subjects.gateway_notify(self._context.member),
        }

    def _silent_s(self, attempt: Attempt, now_s: float) -> float:
        """While its snapshots list the attempt, the instance speaks for it."""
        listed_s = self._calls.pool.listed_s(attempt.instance, attempt.key)
        attempt.heard_s = max(attempt.heard_s, listed_s)
        return now_s - attempt.heard_s

    async def _on_granted(self, granted: Granted) -> None:
        """Said ahead of the body, so that it comes before the first token."""
        await self._say(
            CallStarted(
                call_id=self.ask.call_id,
                request_id=self.ask.request_id,
                session=granted.session,
                source=granted.source,
                model=granted.grant.model,
                instance=granted.grant.instance,
            )
        )

    def _on_accepted(self, attempt: Attempt) -> None:
        """The instance speaks to the caller from here on."""

    async def _after_no_answer(self, attempt: Attempt) -> Accepted | RetryReason:
        payload = wire.encode(Withdraw(key=attempt.key))
        end_s = self._now_s() + WITHDRAW_S
        while self._now_s() < end_s:
            if attempt.accepted_s is not None:
                return Accepted(key=attempt.key)
            try:
                answer = await self._context.bus.request(
                    subjects.attempt(attempt.instance), payload, timeout_s=WITHDRAW_EVERY_S
                )
            except NoResponders:
                return RetryReason.NO_RESPONDERS
            except RequestTimeout:
                continue
            withdrawn = wire.decode(wire.WITHDRAWN, answer.payload)
            if withdrawn is None or withdrawn.key != attempt.key:
                self._calls.unreadable()
                await asyncio.sleep(WITHDRAW_EVERY_S)
            elif withdrawn.outcome == "tokens":
                self._note_token(attempt)
                return Accepted(key=attempt.key)
            else:
                return RetryReason.NO_ANSWER
        raise Unavailable(
            "instance_unreachable", f"instance {attempt.instance} does not say what became of it"
        )

    def _on_finished(self, ended: Ended) -> None:
        self.settle()

    def _on_failed(self, error: TalariaError) -> None:
        if self._is_told:
            return
        key = self._attempt.key if self._attempt else CallKey(self.ask.call_id)
        self._calls.background(self._say(failure(key, error, self._session())))

    def _session(self) -> str:
        return self.granted.session if self.granted else self.ask.identity.session or ""

    async def _show_life(self) -> None:
        while True:
            await asyncio.sleep(LIFE_EVERY_S)
            if self._task is None or self._task.done():
                return
            attempt = self._attempt
            if attempt is None or attempt.accepted_s is None:
                key = CallKey(self.ask.call_id, self._retries.attempt)
                await self._say(Working(key=key, seq=0, state="placing"))

    async def _say(self, message: Message) -> None:
        await self._context.bus.publish(self._inbox, wire.encode_as(message, "json"))


def failure(key: CallKey, error: TalariaError, session: str = "") -> Ended:
    """The last message to a NATS caller whose call did not end on an instance."""
    return Ended(
        key=key,
        seq=0,
        reason=EndReason.CANCELLED if error.code == CANCELLED else EndReason.FAILED,
        error=ErrorInfo(
            code=error.code,
            detail=error.detail,
            param=error.param,
            retry_after_s=error.retry_after_s,
        ),
        session=session,
    )
