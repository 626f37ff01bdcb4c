"""The instance service: one GPU group with one engine, on the bus. IO."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from talaria_common import subjects
from talaria_common.bus import Msg, Subscription
from talaria_common.errors import TalariaError
from talaria_common.service import Context
from talaria_common.wire import (
    EVICT_KV,
    SNAPSHOT_REQUEST,
    CallKey,
    EndReason,
    ErrorInfo,
    Snapshot,
    decode,
    encode,
)
from talaria_instance.calls import CallBook
from talaria_instance.config import InstanceConfig
from talaria_instance.engine.protocol import Engine
from talaria_instance.intake import Intake
from talaria_instance.outlet import Outlet
from talaria_instance.reports import Place, a_snapshot
from talaria_instance.serving import Serving
from talaria_instance.sink import LoopSink

_log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.2
"""Period of looking for silent streams and passed deadlines."""


class InstanceService:
    """Implements talaria_common.service.Service."""

    def __init__(
        self,
        context: Context,
        *,
        config: InstanceConfig,
        engine: Engine,
        sink: LoopSink,
        models: tuple[str, ...],
        boot_id: str,
        record_to: Path | None = None,
    ) -> None:
        """`sink` is the engine's; `boot_id` is new with each start."""
        self._context = context
        self._config = config
        self._engine = engine
        self._place = Place(context.member, boot_id)
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._book = CallBook(config, context.member, boot_id, models)
        self._outlet = Outlet(
            context.bus,
            context.clock,
            coalesce_s=config.coalesce_s,
            working_every_s=config.working_every_s,
            on_gone=self._client_left,
        )
        self._serving = Serving(
            self._place,
            config=config,
            policy=context.policy,
            models=models,
            clock=context.clock,
            telemetry=context.telemetry,
            engine=engine,
            sink=sink,
            book=self._book,
            outlet=self._outlet,
            record_to=record_to,
            on_change=self._on_change,
        )
        self._intake = Intake(
            config=config,
            bus=context.bus,
            clock=context.clock,
            engine=engine,
            book=self._book,
            serving=self._serving,
            outlet=self._outlet,
            is_ready=lambda: self.is_ready,
            on_change=self._on_change,
        )
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._version = 0
        self._is_started = False
        self._is_stopped = False

    @property
    def is_ready(self) -> bool:
        """Runs are taken: the engine works and the bus is there."""
        now_s = self._context.clock.now_s()
        return (
            self._is_started
            and not self._is_stopped
            and self._serving.is_healthy
            and self._serving.driver.busy_s(now_s) < self._config.engine_silent_s
            and self._context.bus.is_connected
        )

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._engine.start()
        self._outlet.start()
        self._serving.start()
        bus, body_bus, member = self._context.bus, self._context.body_bus, self._place.instance
        bus.on_disconnect(self._bus_lost)
        bus.on_reconnect(self._changed.set)
        take = self._intake.on_message
        self._subscriptions = [
            await body_bus.subscribe(subjects.body_part(member), take),
            await body_bus.subscribe(subjects.run(member), take),
            await bus.subscribe(subjects.attempt(member), take),
            await bus.subscribe(subjects.instance_kv(member), self._on_evict),
            await bus.subscribe(subjects.snapshot_request(member), self._on_snapshot_request),
        ]
        await bus.barrier()
        await body_bus.barrier()
        self._serving.kv.restarted()
        self._is_started = True
        self._tasks = [
            asyncio.create_task(self._report(), name="snapshots"),
            asyncio.create_task(self._look(), name="instance look"),
        ]
        self._changed.set()

    async def drain(self) -> None:
        """Refuse runs, and let accepted calls end within `drain_s`."""
        self._book.is_draining = True
        self._on_change()
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._drained.wait()
        except TimeoutError:
            _log.warning("calls are cut by the drain", extra={"calls": len(self._book.live)})

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._intake.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        lost = ErrorInfo(code="instance_lost", detail="the instance was stopped")
        self._serving.end_all(EndReason.FAILED, lost)
        await self._serving.close()
        await self._outlet.close()
        await self._engine.close()

    def _on_change(self) -> None:
        self._changed.set()
        if self._book.is_draining and not self._book.live:
            self._drained.set()

    # --- the bus --------------------------------------------------------------------------------

    async def _on_evict(self, message: Msg) -> None:
        evict = decode(EVICT_KV, message.payload)
        if evict is None:
            self._serving.metrics.dropped.inc()
        else:
            self._engine.drop_host_kv(evict.prefixes)

    async def _on_snapshot_request(self, message: Msg) -> None:
        request = decode(SNAPSHOT_REQUEST, message.payload)
        if request is None:
            self._serving.metrics.dropped.inc()
            return
        self._book.see_epoch(request.epoch)
        if message.reply:
            await self._publish(message.reply, self._snapshot())
        self._changed.set()

    def _bus_lost(self) -> None:
        """Readers cannot be reached: open streams end, what they were for is placed again."""
        error = ErrorInfo(code="bus_down", detail="the bus was lost", retry_after_s=1.0)
        self._serving.end_all(EndReason.FAILED, error)

    def _client_left(self, key: CallKey) -> None:
        """Nobody listens on a call's inbox any more."""
        call = self._book.live.get(key)
        if call is not None:
            self._book.bury(key, self._context.clock.now_s())
            self._serving.end(call, EndReason.CANCELLED)

    # --- what is told ---------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        self._version += 1
        now_s = self._context.clock.now_s()
        return a_snapshot(
            self._place,
            version=self._version,
            is_ready=self.is_ready,
            facts=self._engine.facts(),
            scheduler=self._serving.scheduler,
            book=self._book,
            prefixes=self._serving.prefixes.held(now_s),
            now_s=now_s,
        )

    async def _publish(self, subject: str, snapshot: Snapshot) -> None:
        try:
            await self._context.bus.publish(subject, encode(snapshot))
        except TalariaError as error:
            _log.debug("snapshot not sent", extra={"reason": str(error)})

    async def _report(self) -> None:
        """Snapshots: each half second and on change, at most ten a second."""
        subject = subjects.snapshot(self._place.instance)
        while True:
            try:
                async with asyncio.timeout(self._config.snapshot_every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._publish(subject, self._snapshot())
            except TalariaError as error:  # the engine is down; the silence says so
                _log.warning("no snapshot", extra={"reason": str(error)})
            await asyncio.sleep(self._config.snapshot_gap_s)

    async def _look(self) -> None:
        """Signs of life for silent streams, and the end of overdue calls."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for key in self._outlet.silent(self._context.clock.now_s()):
                call = self._book.live.get(key)
                if call is not None:
                    self._outlet.working(key, call.state)
            self._serving.end_overdue()
