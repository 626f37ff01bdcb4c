"""What an instance shows of itself: snapshots, slot reports, metrics, spans. IO (telemetry)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from talaria_common import attributes as names
from talaria_common.telemetry import Telemetry
from talaria_common.wire import (
    CallEnded,
    HeldPrefix,
    ModelState,
    SlotReport,
    SlotState,
    Snapshot,
)
from talaria_instance.calls import Call, CallBook
from talaria_instance.engine.protocol import EngineFacts, ModelFacts
from talaria_instance.events import Admit, Parked, RoundPlanned, SlotClosed
from talaria_instance.scheduler import Scheduler

SLOT_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Place:
    """Who this instance is."""

    instance: str
    boot_id: str


def a_snapshot(
    place: Place,
    *,
    version: int,
    is_ready: bool,
    facts: EngineFacts,
    scheduler: Scheduler,
    book: CallBook,
    prefixes: tuple[HeldPrefix, ...],
    now_s: float,
) -> Snapshot:
    """The state of an instance now."""
    slot = scheduler.slot
    slot_state = None
    if slot is not None:
        queue = scheduler.queues[slot.model]
        remaining_s = slot.left_s(now_s, queue.timing.switch_s)
        slot_state = SlotState(model=slot.model, phase=slot.phase(queue), remaining_s=remaining_s)
    return Snapshot(
        instance=place.instance,
        boot_id=place.boot_id,
        version=version,
        epoch_seen=book.epoch_seen,
        engine=facts.engine,
        is_ready=is_ready,
        is_draining=book.is_draining,
        models=tuple(_model_state(scheduler, model, now_s) for model in facts.models),
        slot=slot_state,
        round_s=scheduler.round_s,
        blocks_free=facts.blocks_free,
        blocks_total=facts.blocks_total,
        queued_calls=book.queued_calls,
        queued_body_bytes=book.queued_bytes,
        host_kv_bytes=facts.host_kv_bytes,
        prefixes=prefixes,
        live_grants=book.live_grants(),
        ended=book.ended(now_s),
    )


def _model_state(scheduler: Scheduler, facts: ModelFacts, now_s: float) -> ModelState:
    queue = scheduler.queues[facts.model]
    timing = queue.timing
    is_active = scheduler.active == facts.model
    return ModelState(
        model=facts.model,
        residency=facts.residency,
        calls_waiting=len(queue.waiting),
        calls_running=len(queue.running),
        remaining_s=scheduler.remaining_s(facts.model),
        queued_s=scheduler.queued_s(facts.model),
        next_slot_s=scheduler.next_slot_s(facts.model, now_s),
        switch_s=0.0 if is_active else timing.switch_s,
        prefill_fixed_s=timing.prefill_fixed_s,
        prefill_token_s=timing.prefill_token_s,
        decode_step_s=timing.decode_step_s,
        restore_token_s=timing.restore_token_s,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        block_tokens=facts.block_tokens,
        blocks_max=facts.blocks_max,
        max_model_len=facts.max_model_len,
        weight_bytes=facts.weight_bytes,
        deadline_risk=queue.deadline_risk,
    )


def a_slot_report(instance: str, slot: SlotClosed, now_unix_s: float) -> SlotReport:
    """A closed slot as others hear of it."""
    return SlotReport(
        instance=instance,
        model=slot.model,
        n=slot.n,
        round_n=slot.round_n,
        opened_unix_s=max(0.0, now_unix_s - slot.wall_s),
        switch_s=slot.switch_s,
        active_s=slot.active_s,
        idle_s=slot.idle_s,
        phases=slot.phases,
        switch_path=slot.switch_path,
        switch_bytes=slot.switch_bytes,
        prefilled=slot.prefilled,
        sp_admitted=slot.sp_admitted,
        sp_parked=slot.sp_parked,
        tokens=slot.tokens,
        paused=len(slot.paused),
        closed_because=slot.closed_because.value,
    )


class InstanceMetrics:
    """The instance's counters, gauges and histograms."""

    def __init__(self, telemetry: Telemetry) -> None:
        metrics = telemetry.metrics
        self._running = metrics.gauge(
            "talaria_instance_calls_running", "Calls that the engine holds.", ("model",)
        )
        self._waiting = metrics.gauge(
            "talaria_instance_calls_waiting", "Calls in a model's queue.", ("model",)
        )
        self._calls = metrics.counter(
            "talaria_instance_calls", "Accepted calls that ended.", ("model", "outcome")
        )
        self._refused = metrics.counter(
            "talaria_instance_refused", "Runs that were refused.", ("reason",)
        )
        self._rounds = metrics.counter("talaria_instance_rounds", "Rounds planned.")
        self._slots = metrics.histogram(
            "talaria_instance_slot_seconds", "Open slots.", ("model",), SLOT_BUCKETS_S
        )
        self._switches = metrics.histogram(
            "talaria_instance_switch_seconds", "Switches.", ("model", "path"), SLOT_BUCKETS_S
        )
        self._closed = metrics.counter(
            "talaria_instance_slots_closed", "Slots by why they closed.", ("because",)
        )
        self._admitted = metrics.counter(
            "talaria_instance_admitted", "Calls admitted to the engine.", ("phase",)
        )
        self._parked = metrics.counter(
            "talaria_instance_sp_parked", "Continuations parked, by budget.", ("budget",)
        )
        self.dropped = metrics.counter(
            "talaria_instance_messages_dropped", "Messages that could not be read."
        )

    def calls(self, scheduler: Scheduler) -> None:
        """Set the gauges of all models."""
        for model, queue in scheduler.queues.items():
            self._running.labels(model).set(len(queue.running))
            self._waiting.labels(model).set(len(queue.waiting))

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def ended(self, ended: CallEnded) -> None:
        self._calls.labels(ended.grant.model, ended.reason.value).inc()

    def decided(self, effect: Admit | Parked | RoundPlanned | SlotClosed) -> None:
        """Count a decision of the scheduler."""
        match effect:
            case Admit(keys=keys, phase=phase):
                self._admitted.labels(phase).inc(len(keys))
            case Parked(because=because):
                self._parked.labels(because.value).inc()
            case RoundPlanned():
                self._rounds.inc()
            case SlotClosed():
                self._closed.labels(effect.closed_because.value).inc()
                self._slots.labels(effect.model).observe(effect.active_s + effect.idle_s)
                if effect.switch_s > 0:
                    self._switches.labels(effect.model, effect.switch_path).observe(effect.switch_s)


class CallSpans:
    """The parts of a call as spans below its own (the gateway writes that one)."""

    def __init__(self, telemetry: Telemetry, place: Place) -> None:
        self._spans = telemetry.spans
        self._place = {names.INSTANCE: place.instance, names.BOOT: place.boot_id}

    def ended(self, call: Call, offset_s: float) -> None:
        """Write where the time of a call went; `offset_s` is wall clock minus monotonic clock."""
        if call.ledger is None:
            return
        of_part: dict[str, dict[str, int]] = {
            "prefill": {
                names.INPUT_TOKENS: 0 if call.prepared is None else call.prepared.prompt_tokens,
                names.CACHED_TOKENS: call.cached_tokens,
            },
            "restore": {names.RESTORED_TOKENS: call.restored_tokens},
            "decode": {names.OUTPUT_TOKENS: call.tokens},
        }
        for interval in call.ledger.intervals:
            self._spans.part(
                call.run.tenant,
                call.run.session,
                call.key,
                interval.part,
                interval.start_s + offset_s,
                interval.end_s + offset_s,
                {**self._place, names.REQUEST_MODEL: call.model, **of_part.get(interval.part, {})},
            )

    def kv_saved(self, call: Call, start_unix_s: float, end_unix_s: float, nbytes: int) -> None:
        """Write that blocks of a call were copied to the host after its last token."""
        self._spans.part(
            call.run.tenant,
            call.run.session,
            call.key,
            "kv_save",
            start_unix_s,
            end_unix_s,
            {**self._place, names.REQUEST_MODEL: call.model, names.SAVED_BYTES: nbytes},
        )
