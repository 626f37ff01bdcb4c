"""Runs, cancels and withdrawals as they come in (protocols 1). IO (bus, engine.prepare).

run ──▶ known key? its earlier answer
    ──▶ refusal?   Refused
    ──▶ under check: body, JSON, engine.prepare ──▶ refusal? Refused
                                                ──▶ queued and Accepted, in one step
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from talaria_common import subjects
from talaria_common.bodies import Assembler
from talaria_common.bus import Bus, Msg
from talaria_common.clock import Clock
from talaria_common.errors import Rejected, TalariaError, Unavailable
from talaria_common.wire import (
    INSTANCE_COMMAND,
    Accepted,
    BodyPart,
    CallKey,
    CancelAttempt,
    EndReason,
    ErrorInfo,
    Message,
    RefusalReason,
    Refused,
    RunCall,
    RunReply,
    Withdraw,
    Withdrawn,
    decode,
    encode,
)
from talaria_instance.calls import Call, CallBook, refusal_error
from talaria_instance.config import InstanceConfig
from talaria_instance.engine.protocol import Engine, EngineCall, EngineRequest
from talaria_instance.outlet import Outlet
from talaria_instance.serving import Serving

_log = logging.getLogger(__name__)

_BODY: Final = msgspec.json.Decoder(dict[str, Any])


class Intake:
    """Answers the gateways."""

    def __init__(
        self,
        *,
        config: InstanceConfig,
        bus: Bus,
        clock: Clock,
        engine: Engine,
        book: CallBook,
        serving: Serving,
        outlet: Outlet,
        is_ready: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._book = book
        self._serving = serving
        self._outlet = outlet
        self._is_ready = is_ready
        self._on_change = on_change
        self._assembler = Assembler(bytes_max=config.queued_bytes_max)
        self._parts_came: dict[CallKey, asyncio.Event] = {}
        self._checks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop checking; those runs stay unanswered. Idempotent."""
        for task in self._checks:
            task.cancel()
        if self._checks:
            await asyncio.wait(self._checks)

    async def on_message(self, message: Msg) -> None:
        """Take a command of any of the instance's subjects."""
        command = decode(INSTANCE_COMMAND, message.payload)
        match command:
            case None:
                self._serving.metrics.dropped.inc()
            case RunCall():
                await self._on_run(command, message.reply)
            case BodyPart():
                self._assembler.add(command, self._clock.now_s())
                if command.key in self._parts_came:
                    self._parts_came[command.key].set()
            case CancelAttempt(key=key):
                await self._send(message.reply, self._cancel(key))
            case Withdraw(key=key):
                await self._send(message.reply, self._withdraw(key))

    # --- runs -----------------------------------------------------------------------------------

    async def _on_run(self, run: RunCall, reply: str) -> None:
        key, now_s = run.grant.key, self._clock.now_s()
        earlier = self._book.outcome(key)
        if earlier is not None:
            await self._send(reply, earlier)
            return
        if key in self._book.live:  # a repeat while under check gets the same answer
            self._book.live[key].asked_by.append(reply)
            return
        reason = self._refusal(run)
        body_bytes = len(run.body) or self._assembler_bytes(run)
        if reason is None and self._book.is_full(body_bytes):
            reason = "full"
        if reason is None:
            self._book.see_epoch(run.grant.epoch)
            call = self._book.arrive(run, reply, body_bytes, now_s)
            task = asyncio.create_task(self._check(call), name=f"check {key}")
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)
            self._on_change()
            return
        await self._refuse(run, [reply], reason)

    def _assembler_bytes(self, run: RunCall) -> int:
        """A large body's size is known only when its parts are here; until then its share of all."""
        return self._assembler.nbytes // max(1, self._assembler.calls) if run.parts else 0

    def _refusal(self, run: RunCall) -> RefusalReason | None:
        reason = self._book.refusal(run, self._clock.now_s())
        return reason if reason is not None or self._is_ready() else "not_ready"

    async def _check(self, call: Call) -> None:
        """Read and prepare a run, then accept or refuse it."""
        listening = await self._outlet.listen(call.key)
        answer: RunReply | None = None
        told: ErrorInfo | None = None
        try:
            body = await self._read(call)
            prepared = await self._prepare(call.run, body)
            # From here to `accept` nothing waits: what is checked here holds when it is queued.
            reason = self._refusal(call.run)
            if reason is None:
                expected = prepared.max_tokens if body.get("ignore_eos") else 0
                self._serving.accept(call, prepared, expected, listening)
                answer = Accepted(key=call.key, prompt_tokens=prepared.prompt_tokens)
                self._book.settle(call.key, answer)
        except Rejected as error:
            reason, told = "invalid", _told(error)
        except TalariaError as error:
            reason, told = "not_ready", _told(error)
        except Exception as error:  # an engine's own mistake is not the caller's
            _log.exception("a call could not be prepared", extra={"call": str(call.key)})
            reason, told = "not_ready", ErrorInfo(code="internal", detail=str(error))
        if answer is not None:
            for reply in call.asked_by:
                await self._send(reply, answer)
            return
        await listening[1].unsubscribe()
        await self._refuse(call.run, call.asked_by, reason or "not_ready", told)

    async def _refuse(
        self,
        run: RunCall,
        replies: list[str],
        reason: RefusalReason,
        error: ErrorInfo | None = None,
    ) -> None:
        told = error or refusal_error(reason, run.grant.model)
        refused = Refused(key=run.grant.key, reason=reason, error=told)
        self._assembler.drop(run.grant.key)
        self._book.settle(run.grant.key, refused)
        self._serving.metrics.refused(reason)
        self._on_change()
        for reply in replies:
            await self._send(reply, refused)

    async def _read(self, call: Call) -> dict[str, Any]:
        """The call's JSON body; the run that is kept loses it."""
        data = await self._bytes_of(call.run)
        call.body_bytes = len(data)
        call.run = msgspec.structs.replace(call.run, body=b"")
        try:
            return _BODY.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Rejected("invalid_request", f"the body is no JSON object: {error}") from error

    async def _bytes_of(self, run: RunCall) -> bytes:
        key = run.grant.key
        came = self._parts_came.setdefault(key, asyncio.Event())
        try:
            async with asyncio.timeout(self._config.body_wait_s):
                while (data := self._assembler.take(run, self._clock.now_s())) is None:
                    came.clear()
                    await came.wait()
                return data
        except TimeoutError as error:
            raise Unavailable("connection_lost", "parts of the body are missing") from error
        finally:
            self._parts_came.pop(key, None)

    async def _prepare(self, run: RunCall, body: dict[str, Any]) -> EngineCall:
        request = EngineRequest(
            key=run.grant.key,
            model=run.grant.model,
            endpoint=run.endpoint,
            body=body,
            tenant=run.tenant,
            session=subjects.session_key(run.tenant, run.session),
        )
        prepared = await self._engine.prepare(request)
        blocks_max = self._serving.scheduler.queues[run.grant.model].blocks_max
        if prepared.blocks_needed > blocks_max:
            raise Rejected(
                "context_length_exceeded",
                f"prompt and output of {prepared.prompt_tokens} + {prepared.max_tokens} tokens "
                f"need {prepared.blocks_needed} KV blocks; there are {blocks_max}",
                param="max_tokens",
            )
        return prepared

    # --- cancels --------------------------------------------------------------------------------

    def _cancel(self, key: CallKey) -> Withdrawn:
        """Stop an attempt whatever its state, and never run it."""
        was_seen = self._book.had_token(key) is not None
        self._stop(key)
        return Withdrawn(key=key, outcome="stopped" if was_seen else "unknown")

    def _withdraw(self, key: CallKey) -> Withdrawn:
        """Stop an attempt unless a token of it has gone out."""
        match self._book.had_token(key):
            case True:
                return Withdrawn(key=key, outcome="tokens")
            case False:
                self._stop(key)
                return Withdrawn(key=key, outcome="stopped")
            case None:
                self._book.bury(key, self._clock.now_s())
                return Withdrawn(key=key, outcome="unknown")

    def _stop(self, key: CallKey) -> None:
        self._book.bury(key, self._clock.now_s())
        self._assembler.drop(key)
        call = self._book.live.get(key)
        if call is not None:  # one under check finds its tombstone
            self._serving.end(call, EndReason.CANCELLED)

    async def _send(self, reply: str, message: Message) -> None:
        if not reply:
            return
        try:
            await self._bus.publish(reply, encode(message))
        except TalariaError as error:
            # The gateway asks again, and is answered from what is remembered.
            _log.debug("answer not sent", extra={"reason": str(error)})


def _told(error: TalariaError) -> ErrorInfo:
    return ErrorInfo(
        code=error.code,
        detail=error.detail,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )
