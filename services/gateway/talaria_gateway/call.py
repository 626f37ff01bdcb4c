"""The life of one call: placed, run, retried before its first token, settled (protocols 1). IO.

    place ──▶ run ──▶ accepted ──▶ tokens ──▶ ended
      ▲         │         │           │
      └─────────┴─────────┘           └──▶ error: the first token is the point of no return
       refused, gone, silent

One task per call. What comes from outside (stream messages, notices, a cancel, a lost bus) is
applied by plain methods; the task waits for the futures that they resolve.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from talaria_common.errors import InvariantBroken, Rejected, TalariaError, Unavailable
from talaria_common.wire import (
    Accepted,
    CallKey,
    Delta,
    Ended,
    Granted,
    NotGranted,
    Refused,
    StreamMessage,
)
from talaria_gateway.account import CANCELLED, FINISHED, Ask, Tally
from talaria_gateway.attempt import Attempt, Outcome
from talaria_gateway.placing import ask_router, question
from talaria_gateway.retry import Retries, RetryReason, error_of, error_of_end
from talaria_gateway.running import run_call, send

if TYPE_CHECKING:
    from talaria_gateway.calls import Calls

_log = logging.getLogger(__name__)

SWEEP_S: Final = 0.25
LARGE_BODY_BYTES: Final = 1_000_000

T = TypeVar("T")


class Call(ABC):
    """One call; subclasses know where its tokens go."""

    def __init__(self, calls: Calls, ask: Ask) -> None:
        self.ask = ask
        self.tally = Tally()
        self.granted: Granted | None = None
        self._calls = calls
        self._context = calls.context
        self._config = calls.config
        self._retries = Retries()
        self._attempt: Attempt | None = None
        self._stopped: asyncio.Future[TalariaError] = asyncio.get_running_loop().create_future()
        self._is_settled = False
        self._place_began_s: float | None = None
        self._links = ask.links
        self._task: asyncio.Task[None] | None = None

    # --- from outside -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the call ends by itself, or by `stop`."""
        self._task = asyncio.create_task(self._live(), name=f"call {self.ask.call_id}")

    @property
    def task(self) -> asyncio.Task[None] | None:
        return self._task

    def stop(self, error: TalariaError) -> None:
        """End the call with `error`, whatever its state; idempotent."""
        if not self._stopped.done():
            self._stopped.set_result(error)

    def cancel(self) -> None:
        """The caller has left."""
        self.stop(Rejected(CANCELLED, "the call was cancelled"))

    def check(self, now_s: float) -> None:
        """Look after the running attempt, each `SWEEP_S`: no answer, lost instances, silence."""
        attempt = self._attempt
        if attempt is None or attempt.over.done():
            return
        if attempt.accepted_s is None:
            # Counted in sweeps: the time in which this process itself was stuck is not held
            # against the instance, whose answer may be waiting behind it.
            attempt.wait(SWEEP_S)
            return
        if self._calls.pool.has_restarted(attempt.instance, attempt.boot_id):
            attempt.end(RetryReason.INSTANCE_LOST)
            return
        if self._silent_s(attempt, now_s) > self._config.silence_s:
            attempt.end(RetryReason.SILENCE)

    @property
    def instance(self) -> str | None:
        """The instance that has accepted the call and runs it now."""
        attempt = self._attempt
        is_running = attempt is not None and attempt.is_held and not attempt.over.done()
        return attempt.instance if attempt is not None and is_running else None

    def lose(self, instance: str) -> None:
        """The instance is gone with all its calls."""
        if self._attempt is not None and self.instance == instance:
            self._attempt.end(RetryReason.INSTANCE_LOST)

    # --- what subclasses say ----------------------------------------------------------------------

    @abstractmethod
    def _run_fields(self, key: CallKey) -> dict[str, Any]:
        """Where the tokens go: fields of RunCall."""

    @abstractmethod
    def _silent_s(self, attempt: Attempt, now_s: float) -> float:
        """For how long nothing has been heard of an accepted attempt."""

    @abstractmethod
    async def _on_granted(self, granted: Granted) -> None:
        """A place was found; the body goes out next."""

    @abstractmethod
    def _on_accepted(self, attempt: Attempt) -> None:
        """An instance has the call."""

    @abstractmethod
    async def _after_no_answer(self, attempt: Attempt) -> Accepted | RetryReason:
        """The run was not answered: whether it goes on or how it ended."""

    @abstractmethod
    def _on_finished(self, ended: Ended) -> None:
        """The call is answered."""

    @abstractmethod
    def _on_failed(self, error: TalariaError) -> None:
        """The call has ended without an answer."""

    async def _close(self) -> None:  # noqa: B027 (most calls hold nothing)
        """Give back what the call held."""

    # --- the life ---------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            self._on_finished(await self._answer())
        except TalariaError as error:
            self._fail(error)
        except Exception:  # the one place where a mistake in here ends: as the caller's 500
            _log.exception("a call failed", extra={"call": self.ask.call_id})
            self._fail(InvariantBroken("the gateway failed; its log says how"))
        finally:
            self._calls.forget(self)
            await self._close()

    async def _answer(self) -> Ended:
        """Attempt after attempt until one ends by itself; raises what ends the call."""
        while True:
            granted = await self._place()
            await self._on_granted(granted)
            attempt = self._begin(granted)
            outcome = await self._run(attempt)
            match outcome:
                case Ended():
                    self._release(attempt)
                    return self._judged(outcome)
                case Refused():
                    has_restarted = self._calls.pool.has_restarted(
                        attempt.instance, attempt.boot_id
                    )
                    reason = RetryReason.REFUSED
                    error = self._retries.refused(
                        outcome, attempt.instance, is_new_boot=has_restarted
                    )
                case RetryReason.NO_RESPONDERS:
                    self._calls.pool.forget(attempt.instance)
                    reason, error = outcome, self._retries.no_responders(attempt.instance)
                case RetryReason.NO_ANSWER:
                    reason, error = outcome, self._retries.no_answer(attempt.instance)
                case _:
                    reason = outcome
                    error = self._retries.lost(
                        attempt.instance, outcome, has_token=attempt.has_token
                    )
            self._give_up(attempt, outcome)
            if error is not None:
                raise error
            self._calls.account.retried(reason)
            _log.info(
                "a call is placed again",
                extra={"call": str(attempt.key), "instance": attempt.instance, "reason": reason},
            )
            if self._retries.pause_s:
                await self._race(asyncio.sleep(self._retries.pause_s))

    def _judged(self, ended: Ended) -> Ended:
        """The end of a finished call; raises what any other end means."""
        self.tally.usage = ended.usage
        self.tally.add_parts(ended.parts)
        error = error_of_end(ended)
        if error is not None:
            raise error
        self.tally.finish_reasons = [ended.finish_reason or "stop"]
        return ended

    # --- placing ----------------------------------------------------------------------------------

    async def _place(self) -> Granted:
        if self._place_began_s is None:
            self._place_began_s = self._now_s()
            self.tally.gateway_s = self._place_began_s - self.ask.arrived_s
        began_s = self._now_s()
        place = question(self.ask, self._links, self._retries)
        reply = await self._race(
            ask_router(self._context.bus, self._config, place, self._calls.unreadable)
        )
        # Placing is the router and the way there and back: this round trip, admission's part apart.
        self.tally.admit_s += reply.admit_s
        self.tally.place_s += max(reply.place_s, self._now_s() - began_s - reply.admit_s)
        if isinstance(reply, NotGranted):
            raise self._no_place(reply)
        self.granted = self.tally.granted = reply
        return reply

    def _no_place(self, reply: NotGranted) -> TalariaError:
        """What the caller is told: what the last instance said, where no other is left."""
        last = self._retries.last_error
        if reply.error.code == "no_instance" and last is not None:
            return last
        return error_of(reply.error)

    # --- running ----------------------------------------------------------------------------------

    def _begin(self, granted: Granted) -> Attempt:
        is_large = len(self.ask.checked.raw) > LARGE_BODY_BYTES
        patience_s = (
            self._config.accept_timeout_large_s if is_large else self._config.accept_timeout_s
        )
        attempt = self._attempt = Attempt(granted, self._now_s(), patience_s)
        self.tally.attempts = granted.grant.key.attempt
        return attempt

    async def _run(self, attempt: Attempt) -> Outcome:
        run, parts = run_call(
            self.ask,
            attempt.granted,
            self._links[-1] if self._links else None,
            self._deadline_s(),
            self._run_fields(attempt.key),
        )
        sending = asyncio.ensure_future(
            send(self._context.body_bus, run, parts, self._calls.unreadable)
        )
        try:
            await self._race_any(sending, attempt.accepted, attempt.unanswered)
            if attempt.accepted_s is None:
                answer = sending.result() if sending.done() else RetryReason.NO_ANSWER
                if answer is RetryReason.NO_ANSWER:
                    answer = await self._race(self._after_no_answer(attempt))
                if not isinstance(answer, Accepted):
                    return answer
                self._accept(attempt)
        finally:
            _drop(sending)
        await self._race_any(attempt.over)
        return attempt.over.result()

    def _deadline_s(self) -> float:
        left_s = self._config.call_deadline_s - (self._now_s() - self.ask.arrived_s)
        if left_s <= 0:
            raise Unavailable("deadline_exceeded", "the call found no place before its deadline")
        return left_s

    def _accept(self, attempt: Attempt) -> None:
        if attempt.accept(self._now_s()):
            self.tally.transfer_s += self._now_s() - attempt.sent_s
            attempt.is_held = True
            self._calls.held.add(attempt.granted.grant.model)
            self._on_accepted(attempt)

    def _note_token(self, attempt: Attempt) -> None:
        """A token has gone out: there is no way back."""
        self._accept(attempt)
        if not attempt.has_token:
            attempt.first_token_s = self._now_s()
            self.tally.ttft_s = attempt.first_token_s - self.ask.arrived_s

    def _take(self, message: StreamMessage) -> bool:
        """Apply a message of the running attempt; True if it is news."""
        attempt = self._attempt
        if attempt is None or not attempt.takes(message, self._now_s()):
            return False
        match message:
            case Delta():
                self._note_token(attempt)
            case Ended():
                self._accept(attempt)
                attempt.end(message)
            case _:
                self._accept(attempt)
        return True

    # --- endings ----------------------------------------------------------------------------------

    def _give_up(self, attempt: Attempt, outcome: Outcome) -> None:
        """Leave an attempt behind; it is told to stop unless it surely has."""
        self._attempt = None
        self._note_lost(attempt)
        self._release(attempt)
        if isinstance(outcome, RetryReason) and outcome is not RetryReason.NO_RESPONDERS:
            self._calls.cancel_attempt(attempt.key, attempt.instance, attempt.boot_id)

    def _fail(self, error: TalariaError) -> None:
        """Stop what may still run, write the call down, tell the caller."""
        if error.code == CANCELLED:
            self._calls.announce_cancel(self.ask.call_id)
        attempt = self._attempt
        if attempt is not None and not attempt.over.done():
            self._note_lost(attempt)
            self._calls.cancel_attempt(attempt.key, attempt.instance, attempt.boot_id)
        if attempt is not None:
            self._release(attempt)
        self.settle(error.code)
        self._on_failed(error)

    def _note_lost(self, attempt: Attempt) -> None:
        """The time of an attempt that did not end by itself is part of the call's."""
        now_s = self._now_s()
        if attempt.accepted_s is None:
            self.tally.transfer_s += now_s - attempt.sent_s
        else:
            self.tally.add_parts(attempt.lost_parts(now_s))

    def _release(self, attempt: Attempt) -> None:
        """The instance no longer holds the attempt, or will not soon; idempotent."""
        if attempt.is_held:
            attempt.is_held = False
            self._calls.held.drop(attempt.granted.grant.model, self._now_s())

    def settle(self, outcome: str = FINISHED) -> None:
        """Write the call down; idempotent. Doors call it just before the last byte goes out."""
        if self._is_settled:
            return
        self._is_settled = True
        settled = self._calls.account.settle(self.ask, self.tally, outcome)
        if settled is not None:
            self._calls.background(self._context.bus.publish(*settled))

    # --- waiting ----------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._context.clock.now_s()

    async def _race(self, awaitable: Awaitable[T]) -> T:
        """The result of `awaitable`, unless the call is stopped first: then that error."""
        task = asyncio.ensure_future(awaitable)
        try:
            await self._race_any(task)
        finally:
            _drop(task)
        return task.result()

    async def _race_any(self, *futures: asyncio.Future[Any]) -> None:
        if not self._stopped.done():
            await asyncio.wait({*futures, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            raise self._stopped.result()


def _drop(future: asyncio.Future[Any]) -> None:
    """Want no more of it; an error that it already has is not news."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()
