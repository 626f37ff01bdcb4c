"""The router on the bus: hears the cluster, answers PlaceCall with admission's word. IO.

    PlaceCall ──policy──▶ AdmitCall ──admission──▶ Granted | NotGranted ──▶ the gateway

Any number of routers share the queue group; each keeps a view of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from talaria_common import attributes as at
from talaria_common import subjects, wire
from talaria_common.bus import BusDown, Handler, Msg, NoResponders, RequestTimeout, Subscription
from talaria_common.config import TelemetryConfig
from talaria_common.service import Context, Recorder, Shell
from talaria_common.wire import AdmitCall, ErrorInfo, Granted, NotGranted, PlaceCall, PlaceReply
from talaria_router.config import RouterConfig
from talaria_router.policy import Effect, InstanceLost, Placed, Router, RowSeen

QUEUE: Final = "router"
PROBE_EVERY_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 0.5
BUCKET_RETRY_S: Final = 0.5
RANK_BUCKETS_S: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.05)

_log = logging.getLogger(__name__)


class RouterService:
    """One member of the router."""

    def __init__(self, context: Context, config: RouterConfig) -> None:
        self._bus = context.bus
        self._clock = context.clock
        self._config = config
        self._spans = context.telemetry.spans
        self._policy = Router(config, context.policy)
        record_dir = context.settings.section("telemetry", TelemetryConfig).record_dir
        recorder = Recorder(Path(record_dir) / f"{context.member}.jsonl") if record_dir else None
        self._shell: Shell[Effect] = Shell(
            self._policy.step, lambda effect: None, context.clock, recorder
        )
        self._subscriptions: list[Subscription] = []
        self._place_subscription: Subscription | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._placing: set[asyncio.Task[None]] = set()
        self._has_snapshot = asyncio.Event()
        self._has_table = asyncio.Event()
        metrics = context.telemetry.metrics
        self._placed = metrics.counter(
            "talaria_router_placed", "PlaceCalls answered, by reason or error code", ("outcome",)
        )
        self._place_s = metrics.histogram(
            "talaria_router_place_seconds", "From PlaceCall to its answer, without admission"
        )
        self._admit_s = metrics.histogram(
            "talaria_router_admit_seconds", "Waiting for admission, retries included"
        )
        self._rank_s = metrics.histogram(
            "talaria_router_rank_seconds",
            "Pricing one call on all instances",
            buckets=RANK_BUCKETS_S,
        )
        self._dropped = metrics.counter(
            "talaria_router_dropped", "Messages that could not be read", ("kind",)
        )
        self._instances = metrics.gauge("talaria_router_instances", "Instances heard of lately")
        self._in_flight = metrics.gauge("talaria_router_placing", "PlaceCalls being answered")

    async def start(self) -> None:
        """Subscribe; ready once the view is warm, or after a second without anything to hear."""
        for subject, handler in (
            (subjects.ANY_SNAPSHOT, self._hears(wire.SNAPSHOT, "snapshot")),
            (subjects.LOAD, self._hears(wire.LOAD_STATE, "load")),
            (subjects.ANY_CALL_ENDED, self._hears(wire.CALL_ENDED, "ended")),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, handler))
        self._spawn(self._watch_sessions(), self._background)
        self._spawn(self._probe(), self._background)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.ready_within_s):
                await self._has_snapshot.wait()
                await self._has_table.wait()
        self._place_subscription = await self._bus.subscribe(
            subjects.PLACE, self._on_place, queue=QUEUE
        )
        await self._bus.barrier()

    async def drain(self) -> None:
        """Leave the queue group and answer what is being placed."""
        if self._place_subscription is not None:
            await self._place_subscription.unsubscribe()
            self._place_subscription = None
        if self._placing:
            await asyncio.wait(self._placing, timeout=self._config.admit_within_s)

    async def stop(self) -> None:
        """Leave the bus; idempotent."""
        if self._place_subscription is not None:
            await self._place_subscription.unsubscribe()
            self._place_subscription = None
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()
        tasks = [*self._background, *self._placing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._shell.close()

    # --- hearing ---

    def _hears(self, decoder: msgspec.msgpack.Decoder[Any], kind: str) -> Handler:
        async def hear(msg: Msg) -> None:
            event = wire.decode(decoder, msg.payload)
            if event is None:
                self._dropped.labels(kind).inc()
                return
            self._shell.apply(event)
            if kind == "snapshot":
                self._has_snapshot.set()
                self._instances.set(len(self._policy.views.instances))

        return hear

    async def _watch_sessions(self) -> None:
        """Keep the replica of the session table."""
        while True:
            try:
                bucket = await self._bus.bucket(subjects.SESSION_BUCKET)
                async for change in bucket.watch():
                    if change is None:
                        self._has_table.set()
                    elif change.value is not None:
                        self._on_row(change.value)
            except BusDown:
                _log.info("session table not reachable, trying again")
            await asyncio.sleep(BUCKET_RETRY_S)

    def _on_row(self, value: bytes) -> None:
        row = wire.decode(wire.SESSION_ROW, value)
        if row is None:
            self._dropped.labels("row").inc()
        else:
            self._shell.apply(RowSeen(row=row))

    async def _probe(self) -> None:
        """Ask instances whose heartbeat is late; no responders means gone."""
        request = wire.encode(wire.SnapshotRequest())
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            overdue = self._policy.overdue(self._clock.now_s())
            if overdue and self._bus.is_connected:
                await asyncio.gather(*(self._probe_one(lost, request) for lost in overdue))

    async def _probe_one(self, lost: InstanceLost, request: bytes) -> None:
        subject = subjects.snapshot_request(lost.instance)
        try:
            await self._bus.request(subject, request, timeout_s=PROBE_TIMEOUT_S)
        except NoResponders:
            _log.warning("instance is gone", extra={"instance": lost.instance})
            self._shell.apply(lost)
        except (RequestTimeout, BusDown):
            pass  # it is there, or nobody can tell; its snapshot decides

    # --- placing ---

    async def _on_place(self, msg: Msg) -> None:
        place = wire.decode(wire.PLACE_CALL, msg.payload)
        if place is None or not msg.reply:
            self._dropped.labels("place").inc()
        elif len(self._placing) >= self._config.placing_max:
            detail = f"{len(self._placing)} calls are being placed"
            error = ErrorInfo(code="overloaded", detail=detail, retry_after_s=1.0)
            await self._answer(msg.reply, NotGranted(key=place.key, error=error))
        else:
            self._spawn(self._place(place, msg.reply), self._placing)
            self._in_flight.set(len(self._placing))

    async def _place(self, place: PlaceCall, reply: str) -> None:
        began_s, began_unix_s = self._clock.now_s(), self._clock.unix_s()
        (decided,) = self._shell.apply(place)
        asked_s = self._clock.now_s()
        self._rank_s.observe(asked_s - began_s)
        answer: PlaceReply = (
            decided if isinstance(decided, NotGranted) else await self._ask(decided)
        )
        ended_s = self._clock.now_s()
        admit_s = ended_s - asked_s if isinstance(decided, AdmitCall) else 0.0
        place_s = ended_s - began_s - admit_s
        answer = msgspec.structs.replace(answer, place_s=place_s, admit_s=admit_s)
        if isinstance(answer, Granted):
            self._shell.apply(Placed(tenant=place.tenant, granted=answer))
        await self._answer(reply, answer)
        self._place_s.observe(place_s)
        self._admit_s.observe(admit_s)
        if isinstance(answer, Granted) and isinstance(decided, AdmitCall):
            self._write_span(place, decided, answer, began_unix_s)
        self._in_flight.set(len(self._placing) - 1)

    async def _ask(self, question: AdmitCall) -> PlaceReply:
        """Admission's answer; the same question again until it comes or 3 s are over."""
        payload = wire.encode(question)
        key = question.place.key
        give_up_s = self._clock.now_s() + self._config.admit_within_s
        while True:
            left_s = give_up_s - self._clock.now_s()
            timeout_s = max(0.01, min(self._config.admit_answer_s, left_s))
            try:
                msg = await self._bus.request(subjects.ADMIT, payload, timeout_s=timeout_s)
            except NoResponders:
                code, detail = "no_instance", "admission has no leader now"
                await asyncio.sleep(self._config.admit_retry_s)
            except RequestTimeout:
                code, detail = "no_instance", "admission does not answer"
            except BusDown as error:
                code, detail = "bus_down", error.detail
                await asyncio.sleep(self._config.admit_retry_s)
            else:
                answer = wire.decode(wire.PLACE_REPLY, msg.payload)
                if answer is not None and _key_of(answer) == key:
                    return answer
                self._dropped.labels("answer").inc()
                code, detail = "internal", "admission's answer cannot be read"
                await asyncio.sleep(self._config.admit_retry_s)
            if self._clock.now_s() >= give_up_s:
                error_info = ErrorInfo(code=code, detail=detail, retry_after_s=1.0)
                return NotGranted(key=key, error=error_info)

    async def _answer(self, reply: str, answer: PlaceReply) -> None:
        outcome = answer.reason.value if isinstance(answer, Granted) else answer.error.code
        self._placed.labels(outcome).inc()
        with contextlib.suppress(BusDown):  # the gateway asks again
            await self._bus.publish(reply, wire.encode(answer))

    def _write_span(
        self, place: PlaceCall, question: AdmitCall, granted: Granted, began_unix_s: float
    ) -> None:
        if not self._spans.is_on:
            return
        cost, other = granted.cost, granted.runner_up_cost
        attributes = {
            at.INSTANCE: granted.grant.instance,
            at.REASON: granted.reason.value,
            at.REQUEST_MODEL: place.model,
            at.CANDIDATES: len(question.ranked),
            at.EXCLUDED: list(place.excluded) or None,
            at.COST_S: cost.total_s if cost else None,
            at.COST_LOAD_S: cost.load_s if cost else None,
            at.COST_KV_S: cost.kv_s if cost else None,
            at.COST_ACTIVATE_S: cost.activate_s if cost else None,
            at.RUNNER_UP: granted.runner_up,
            at.RUNNER_UP_COST_S: other.total_s if other else None,
        }
        end_unix_s = self._clock.unix_s()
        self._spans.part(
            place.tenant, granted.session, place.key, "place", began_unix_s, end_unix_s, attributes
        )

    def _spawn(self, work: Coroutine[Any, Any, None], into: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        into.add(task)
        task.add_done_callback(into.discard)
        task.add_done_callback(_report)


def _key_of(answer: PlaceReply) -> wire.CallKey:
    return answer.grant.key if isinstance(answer, Granted) else answer.key


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("task failed", exc_info=task.exception())
