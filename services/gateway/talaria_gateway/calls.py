"""All calls of this gateway: cancels, lost buses and lost instances reach them here. IO."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from talaria_common import subjects, wire
from talaria_common.bus import Msg, NoResponders
from talaria_common.errors import TalariaError, Unavailable
from talaria_common.service import Context
from talaria_common.wire import CallKey, CancelAttempt, CancelCall, SnapshotRequest
from talaria_gateway.account import Account
from talaria_gateway.call import SWEEP_S, Call
from talaria_gateway.config import GatewayConfig
from talaria_gateway.nats_call import NatsCall
from talaria_gateway.pool import Held, Pool

_log = logging.getLogger(__name__)

LAST_WORDS_S: Final = 0.3
"""For cancels and accounts that are still to be sent when the gateway stops."""
PROBE_TIMEOUT_S: Final = 0.5
TOMBSTONE_S: Final = 60.0
TOMBSTONES_MAX: Final = 100_000
CANCEL_AGAIN_S: Final = (0.0, 0.5, 1.0)
"""Pauses before each publication of a cancel: at 0, 0.5 and 1.5 s."""
STOP_TRIES: Final = 60
STOP_EVERY_S: Final = 0.5
ABSENT_TRIES: Final = 4
"""No responders so many times in a row: the instance is gone, and not only reconnecting."""

_json_cancel: Final = msgspec.json.Decoder(CancelCall)


class Calls:
    """The open calls by id, and what they share."""

    def __init__(self, context: Context, config: GatewayConfig, pool: Pool) -> None:
        self.context = context
        self.config = config
        self.pool = pool
        self.account = Account(context.telemetry, context.clock)
        self.answers = Answers()
        self.held = Held()
        self._probed: set[str | None] = set()
        self._open: dict[str, Call] = {}
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._is_draining = False
        metrics = context.telemetry.metrics
        self._unreadable = metrics.counter(
            "talaria_gateway_unreadable_total", "Messages that this version cannot read"
        )
        self._open_gauge = metrics.gauge("talaria_gateway_calls_open", "Calls this gateway holds")

    async def start(self) -> None:
        """Listen for cancels and for notices of instances."""
        bus = self.context.bus
        await bus.subscribe(subjects.ANY_CANCEL, self._on_cancel)
        await bus.subscribe(subjects.gateway_notify(self.context.member), self._on_notice)
        bus.on_disconnect(self._on_bus_lost)
        if self.context.body_bus is not bus:
            self.context.body_bus.on_disconnect(self._on_bus_lost)
        self._sweeper = asyncio.create_task(self._sweep(), name="calls sweep")

    def open(self, call: Call) -> None:
        """Take a call in and start it; raises when it cannot be taken."""
        call_id = call.ask.call_id
        if self._is_draining:
            raise Unavailable("overloaded", "the gateway is shutting down", retry_after_s=1.0)
        if len(self._open) >= self.config.calls_max:
            limit = self.config.calls_max
            raise Unavailable("overloaded", f"{limit} calls are open here", retry_after_s=1.0)
        if not self.context.bus.is_connected or not self.context.body_bus.is_connected:
            raise bus_down()
        self._open[call_id] = call
        self._open_gauge.set(len(self._open))
        call.start()
        if call_id in self._cancelled:
            call.cancel()

    @property
    def is_draining(self) -> bool:
        """No new calls are taken."""
        return self._is_draining

    def holds(self, call_id: str) -> bool:
        """The call is open here."""
        return call_id in self._open

    def forget(self, call: Call) -> None:
        """The call is over."""
        self._open.pop(call.ask.call_id, None)
        self._open_gauge.set(len(self._open))

    def unreadable(self) -> None:
        """Count a message that made no sense."""
        self._unreadable.inc()

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that nobody waits for; its Talaria errors end with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    # --- cancelling -------------------------------------------------------------------------------

    def announce_cancel(self, call_id: str) -> None:
        """Tell everybody that the call's client has left, three times."""
        self._bury(call_id)
        self.background(self._announce(call_id))

    def cancel_attempt(self, key: CallKey, instance: str, boot_id: str) -> None:
        """Have an instance stop one attempt; repeated until it answers or is gone."""
        self.background(self._cancel_attempt(key, instance, boot_id))

    async def _announce(self, call_id: str) -> None:
        payload = wire.encode(CancelCall(call_id=call_id))
        for pause_s in CANCEL_AGAIN_S:
            await asyncio.sleep(pause_s)
            with contextlib.suppress(TalariaError):
                await self.context.bus.publish(subjects.cancel(call_id), payload)

    async def _cancel_attempt(self, key: CallKey, instance: str, boot_id: str) -> None:
        payload, absent = wire.encode(CancelAttempt(key=key)), 0
        for _ in range(STOP_TRIES):
            if self.pool.has_restarted(instance, boot_id):
                return
            try:
                await self.context.bus.request(
                    subjects.attempt(instance), payload, timeout_s=STOP_EVERY_S
                )
                return
            except NoResponders:
                absent += 1
                if absent == ABSENT_TRIES:
                    return
                await asyncio.sleep(STOP_EVERY_S)
            except TalariaError:
                absent = 0
                await asyncio.sleep(STOP_EVERY_S if not self.context.bus.is_connected else 0)
        _log.warning("an attempt could not be stopped", extra={"call": str(key)})

    async def _on_cancel(self, message: Msg) -> None:
        call_id = _cancelled_id(message)
        self._bury(call_id)
        call = self._open.get(call_id)
        if call is not None:
            call.cancel()

    def _bury(self, call_id: str) -> None:
        """Remember a cancelled call for 60 s."""
        self._cancelled[call_id] = self.context.clock.now_s()
        self._cancelled.move_to_end(call_id)
        if len(self._cancelled) > TOMBSTONES_MAX:
            self._cancelled.popitem(last=False)

    # --- what happens to all calls ----------------------------------------------------------------

    async def _on_notice(self, message: Msg) -> None:
        notice = wire.decode(wire.NOTICE, message.payload)
        if notice is None:
            self.unreadable()
            return
        call = self._open.get(notice.key.call_id)
        if isinstance(call, NatsCall):
            call.hear(notice)

    def _on_bus_lost(self) -> None:
        for call in list(self._open.values()):
            call.stop(bus_down())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self.context.clock.now_s()
            for call in list(self._open.values()):
                call.check(now_s)
            for instance in {call.instance for call in self._open.values()} - self._probed:
                if instance and self.pool.age_s(instance, now_s) > self.config.probe_after_s:
                    self._probed.add(instance)
                    self.background(self._probe(instance))
            while self._cancelled:
                call_id, buried_s = next(iter(self._cancelled.items()))
                if now_s - buried_s < TOMBSTONE_S:
                    break
                del self._cancelled[call_id]

    async def _probe(self, instance: str) -> None:
        """Ask whether an instance is still there: a dead one has no responders."""
        payload = wire.encode(SnapshotRequest())
        try:
            await self.context.bus.request(
                subjects.snapshot_request(instance), payload, timeout_s=PROBE_TIMEOUT_S
            )
        except NoResponders:
            _log.warning("an instance is gone with its calls", extra={"instance": instance})
            self.pool.forget(instance)
            for call in list(self._open.values()):
                call.lose(instance)
        except TalariaError:
            pass  # it is there, or nobody can tell: the silence of its streams decides
        finally:
            self._probed.discard(instance)

    # --- the end ----------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no new calls and wait for the open ones, at most `drain_s`."""
        self._is_draining = True
        tasks = [call.task for call in self._open.values() if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self.config.drain_s)

    async def stop(self) -> None:
        """End the open calls and send what is left to say, within 1.5 s."""
        self._is_draining = True
        calls = list(self._open.values())
        for call in calls:
            call.stop(Unavailable("instance_lost", "the gateway is shutting down"))
        if calls:
            await asyncio.wait([call.task for call in calls if call.task], timeout=1.0)
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TalariaError):
            _log.error("background work failed", exc_info=error)


class Answers:
    """Sessions of recent answers, for calls that name the answer they go on from. Bounded."""

    KEPT_MAX: Final = 10_000

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()

    def remember(self, tenant: str, answer_id: str, session: str) -> None:
        self._sessions[tenant, answer_id] = session
        if len(self._sessions) > self.KEPT_MAX:
            self._sessions.popitem(last=False)

    def session_of(self, tenant: str, answer_id: str) -> str | None:
        return self._sessions.get((tenant, answer_id))


def bus_down() -> Unavailable:
    """The error of calls that the loss of the bus ends or refuses."""
    return Unavailable("bus_down", "the message bus is down", retry_after_s=1.0)


def _cancelled_id(message: Msg) -> str:
    """Whose cancel this is: MessagePack, JSON, or nothing but the subject."""
    cancel = wire.decode(wire.CANCEL_CALL, message.payload)
    if cancel is None:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            cancel = _json_cancel.decode(message.payload)
    return cancel.call_id if cancel is not None else message.subject.split(".")[-2]
