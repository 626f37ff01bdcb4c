"""Admission on the bus: one leader that decides, and its helpers around the policy. IO.

Start: backup and snapshots first, then decisions. Every message becomes one event; effects are
carried out in order. Answers go to the reply subject of the message at hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, assert_never

import msgspec

from talaria_admission.backup import Backup, leader_epoch
from talaria_admission.config import AdmissionConfig
from talaria_admission.events import (
    Admit,
    CancelAnswered,
    Closing,
    Effect,
    LeaseOver,
    Loaded,
    Opened,
    RowChanged,
    SendCancel,
    SessionOver,
    SessionStarted,
    Tick,
    ToolGap,
    WakeAt,
)
from talaria_admission.policy import Admission
from talaria_admission.telling import Teller
from talaria_common import subjects, wire
from talaria_common.bus import BusDown, Handler, Msg, NoResponders, RequestTimeout, Subscription
from talaria_common.config import TelemetryConfig
from talaria_common.errors import InvariantBroken
from talaria_common.ids import new_ulid
from talaria_common.service import Context, Recorder, Shell
from talaria_common.wire import Granted, LoadState, NotGranted, SessionList, SessionRow

BACKUP_WITHIN_S: Final = 5.0
"""Longest wait for the bucket at start, and for the last rows at stop."""
OUTBOX_MAX: Final = 10_000
CHECK_EVERY_S: Final = 5.0
POLL_S: Final = 0.02

_log = logging.getLogger(__name__)


class AdmissionService:
    """The leader."""

    def __init__(self, context: Context, config: AdmissionConfig) -> None:
        self._bus = context.bus
        self._clock = context.clock
        self._config = config
        self._member = context.member
        self._policy = Admission(config, context.policy)
        record_dir = context.settings.section("telemetry", TelemetryConfig).record_dir
        recorder = Recorder(Path(record_dir) / f"{context.member}.jsonl") if record_dir else None
        self._shell: Shell[Effect] = Shell(
            self._policy.step, self._perform, context.clock, recorder
        )
        self._backup = Backup(context.bus, self._policy.row, config.backup_period_s)
        self._teller = Teller(context.telemetry)
        self._dropped = context.telemetry.metrics.counter(
            "talaria_admission_dropped", "Messages that could not be read or sent", ("kind",)
        )
        self._broken = context.telemetry.metrics.counter(
            "talaria_admission_invariants_broken", "Failed checks of the tables"
        )
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(OUTBOX_MAX)
        self._subscriptions: list[Subscription] = []
        self._admit_subscription: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = 0.0
        self._is_stopped = False

    async def start(self) -> None:
        """Rebuild from backup and instances, then decide."""
        rows, epoch = await self._load()
        self._shell.apply(Loaded(rows=tuple(rows), unix_s=self._clock.unix_s()))
        for subject, decoder, kind in (
            (subjects.ANY_SNAPSHOT, wire.SNAPSHOT, "snapshot"),
            (subjects.ANY_CALL_ENDED, wire.CALL_ENDED, "ended"),
            (subjects.ANY_CALL_SETTLED, wire.CALL_SETTLED, "settled"),
            (subjects.ANY_CANCEL, wire.CANCEL_CALL, "cancel"),
        ):
            handler = self._hears(decoder, kind)
            self._subscriptions.append(await self._bus.subscribe(subject, handler))
        is_first_leader = epoch == 1 and not rows
        if not is_first_leader:
            await self._await_snapshots(rows, epoch)
        self._shell.apply(Opened(epoch=epoch))
        self._spawn(self._backup.run())
        self._spawn(self._send())
        self._subscriptions.append(await self._bus.subscribe(subjects.SESSIONS, self._on_query))
        self._admit_subscription = await self._bus.subscribe(subjects.ADMIT, self._on_admit)
        await self._bus.barrier()

    async def drain(self) -> None:
        """Decide nothing more; go on hearing how calls end."""
        if self._admit_subscription is not None:
            await self._admit_subscription.unsubscribe()
            self._admit_subscription = None

    async def stop(self) -> None:
        """Tell the open sessions, save the last rows, leave the bus; idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.drain()
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()
        self._shell.apply(Closing())
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(BACKUP_WITHIN_S):
                await self._backup.flush()
        except (BusDown, TimeoutError):
            _log.warning("the last session rows are not saved")
        self._shell.close()

    # --- rebuilding ---

    async def _load(self) -> tuple[list[SessionRow], int]:
        """Rows and epoch; without the bucket nothing is remembered, and calls are served all the same."""
        epoch, rows = 1, list[SessionRow]()
        try:
            async with asyncio.timeout(BACKUP_WITHIN_S):
                epoch = await leader_epoch(self._bus, self._member)
                rows = await self._backup.load()
        except (BusDown, TimeoutError):
            _log.error("session backup not reachable: starting without it")
        return rows, epoch

    async def _await_snapshots(self, rows: list[SessionRow], epoch: int) -> None:
        """Give the instances a second to say what they hold; less if all known ones have."""
        known = {row.instance for row in rows if row.instance is not None}
        request = wire.encode(wire.SnapshotRequest(epoch=epoch))
        await self._bus.barrier()
        for instance in sorted(known):
            with contextlib.suppress(BusDown):
                await self._bus.publish(subjects.snapshot_request(instance), request)
        until_s = self._clock.now_s() + self._config.rebuild_s
        while self._clock.now_s() < until_s:
            if known and known <= self._policy.books.account.instances.keys():
                return
            await asyncio.sleep(POLL_S)

    # --- messages ---

    def _hears(self, decoder: msgspec.msgpack.Decoder[Any], kind: str) -> Handler:
        async def hear(msg: Msg) -> None:
            event = wire.decode(decoder, msg.payload)
            if event is None:
                self._dropped.labels(kind).inc()
            else:
                self._shell.apply(event)

        return hear

    async def _on_admit(self, msg: Msg) -> None:
        call = wire.decode(wire.ADMIT_CALL, msg.payload)
        if call is None or not msg.reply:
            self._dropped.labels("admit").inc()
            return
        start_s, start_unix_s = self._clock.now_s(), self._clock.unix_s()
        effects = self._shell.apply(Admit(call=call, fresh_id=new_ulid()))
        took_s = self._clock.now_s() - start_s
        (answer,) = (e for e in effects if isinstance(e, Granted | NotGranted))
        await self._reply(msg.reply, answer)
        self._teller.decided(call.place, answer, took_s, start_unix_s, self._clock.unix_s())

    async def _on_query(self, msg: Msg) -> None:
        query = wire.decode(wire.SESSION_QUERY, msg.payload)
        if query is None or not msg.reply:
            self._dropped.labels("query").inc()
            return
        effects = self._shell.apply(query)
        (answer,) = (e for e in effects if isinstance(e, SessionList | NotGranted))
        await self._reply(msg.reply, answer)

    async def _reply(self, reply: str, answer: wire.Message) -> None:
        with contextlib.suppress(BusDown):  # whoever asked asks again
            await self._bus.publish(reply, wire.encode(answer))

    # --- effects ---

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Granted() | NotGranted() | SessionList():
                pass  # the handler of its message sends it
            case LoadState():
                self._post(subjects.LOAD, effect)
                self._teller.tables(self._policy)
            case SendCancel():
                self._spawn(self._cancel(effect))
            case RowChanged():
                self._backup.touch(effect.tenant, effect.session)
            case LeaseOver():
                self._teller.lease_over(effect)
            case SessionStarted():
                self._teller.session_started(effect)
            case SessionOver():
                self._teller.session_over(effect)
            case ToolGap():
                self._teller.tool_gap(effect)
            case WakeAt():
                self._wake_at(effect.at_s)
            case _:
                assert_never(effect)

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        if self._is_stopped:
            return
        self._shell.apply(Tick())
        now_s = self._clock.now_s()
        if now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            try:
                self._policy.check()
            except InvariantBroken:
                self._broken.inc()
                _log.exception("the tables contradict each other")

    async def _cancel(self, effect: SendCancel) -> None:
        """One CancelAttempt; the policy repeats it while there is no answer."""
        payload = wire.encode(wire.CancelAttempt(key=effect.key))
        subject = subjects.attempt(effect.instance)
        try:
            msg = await self._bus.request(subject, payload, timeout_s=self._config.cancel_repeat_s)
        except (NoResponders, RequestTimeout, BusDown):
            return
        answer = wire.decode(wire.WITHDRAWN, msg.payload)
        if answer is None or answer.key != effect.key:
            self._dropped.labels("withdrawn").inc()
        elif not self._is_stopped:
            self._shell.apply(CancelAnswered(key=answer.key, outcome=answer.outcome))

    def _post(self, subject: str, message: wire.Message) -> None:
        try:
            self._outbox.put_nowait((subject, wire.encode(message)))
        except asyncio.QueueFull:
            self._dropped.labels("outbox").inc()

    async def _send(self) -> None:
        """Publish in order what effects have posted."""
        while True:
            subject, payload = await self._outbox.get()
            with contextlib.suppress(BusDown):  # the next account says it all
                await self._bus.publish(subject, payload)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("task failed", exc_info=task.exception())
