"""Rounds, slots and session-prefill of one instance (A3, A4, protocols 9). Pure.

            ┌───────────── another model has work ─────────────┐
            ▼                                                   │
    idle ─▶ switch ─▶ P ─▶ D1 ─▶ (SP ─▶ D)* ─▶ Dfin ─▶ closed ──┤
     ▲       (none if the model is active)                      │ only this model has work:
     │                                                          │ renewed without a switch
     └──────────────── no model has work ───────────────────────┘

P    resumes what an earlier slot paused, then takes waiting calls in order of arrival.
SP   takes returned continuations of the active model at a decode boundary; new sessions never.
Dfin spends what is left of the protected decode; no prefill.

At most one of {Activate, Run} is outstanding. Whenever none is, `_advance` either issues the next
one or waits: idle, or lingering for returns with a timer set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

from talaria_common.errors import InvariantBroken
from talaria_common.perf import ModelTiming, TimingModel
from talaria_common.policies import PolicySet
from talaria_instance.batches import ordinary_batch, session_prefill
from talaria_instance.closing import TIME_GRAIN_S, CloseRules
from talaria_instance.engine.protocol import Quantum, StepReport, SwitchRecord
from talaria_instance.events import (
    Activate,
    Admit,
    CallAborted,
    CallQueued,
    CancelWake,
    CloseReason,
    CommandFailed,
    Effect,
    Event,
    Interrupt,
    Parked,
    RoundPlanned,
    Run,
    SlotOpened,
    Stepped,
    Switched,
    Tick,
    TimingChanged,
    WakeAt,
)
from talaria_instance.rounds import SchedulerConfig, plan_slot, ring_order, slot_s
from talaria_instance.state import ModelQueue, Slot, Waiting


class Scheduler:
    """Decides what the engine does next; `step` takes one event and returns effects in order."""

    def __init__(self, config: SchedulerConfig, policy: PolicySet, models: tuple[str, ...]) -> None:
        self._config = config
        self._policy = policy
        self._rules = CloseRules(policy)
        self._models = models
        self._queues = {m: ModelQueue(TimingModel(ModelTiming(model=m))) for m in models}
        self._active: str | None = None
        self._slot: Slot | None = None
        self._outstanding: Literal["activate", "run"] | None = None
        self._is_interrupted = False
        self._last_served: str | None = None
        self._round_n = 0
        self._round_left: list[str] = []
        self._slot_s = config.round_s
        self._slots = 0
        self._arrivals = 0
        self._wake_at_s: float | None = None
        self._wake_wanted_s: float | None = None

    @property
    def queues(self) -> Mapping[str, ModelQueue]:
        """Each model's calls and facts, to read."""
        return self._queues

    @property
    def slot(self) -> Slot | None:
        """The open slot, or the one being switched to."""
        return self._slot

    @property
    def active(self) -> str | None:
        """The engine's active model."""
        return self._active

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Apply one event; an event that the state does not allow raises InvariantBroken."""
        out: list[Effect] = []
        match event:
            case CallQueued():
                self._on_queued(event, now_s, out)
            case CallAborted(key=key):
                for queue in self._queues.values():
                    queue.drop(key)
            case Stepped(report=report):
                self._on_stepped(report, now_s)
            case Switched(record=record):
                self._on_switched(record, now_s, out)
            case CommandFailed():
                self._on_failed(now_s, out)
            case Tick():
                self._wake_at_s = None
                self._retry()
            case TimingChanged():
                self._on_timing(event)
            case _:
                assert_never(event)
        self._wake_wanted_s = None
        self._advance(now_s, out)
        self._set_wake(out)
        return out

    # --- events ---------------------------------------------------------------------------------

    def _on_queued(self, call: CallQueued, now_s: float, out: list[Effect]) -> None:
        queue = self._queues.get(call.model)
        if queue is None or call.key in queue.waiting or call.key in queue.running:
            raise InvariantBroken(f"call {call.key} of {call.model!r} cannot be queued")
        self._arrivals += 1
        waiting = Waiting(call, self._arrivals)
        queue.waiting[call.key] = waiting
        if self._may_enter_now(waiting, now_s):
            self._is_interrupted = True
            out.append(Interrupt())

    def _may_enter_now(self, waiting: Waiting, now_s: float) -> bool:
        """Whether the running quantum should end early for a call that has just arrived."""
        slot = self._slot
        if slot is None or self._outstanding != "run" or self._is_interrupted:
            return False
        if slot.model != waiting.call.model or slot.is_final:
            return False
        if self._policy.session_prefill and waiting.is_returning and slot.free_s(now_s) > 0:
            return True
        return self._config.renew_when_alone and not self._is_due_elsewhere(slot.model)

    def _on_stepped(self, report: StepReport, now_s: float) -> None:
        slot = self._finish_command("run")
        queue = self._queues[slot.model]
        slot.has_run = True
        slot.account_run(report, now_s)
        slot.iterations += report.iterations
        has_moved = report.iterations > 0 or report.prefill_tokens > 0
        for progress in report.calls:
            slot.tokens += progress.new_tokens
            running = queue.running.get(progress.key)
            if running is None:
                continue
            running.advance(progress)
            is_finished = progress.finish is not None
            if is_finished or progress.failed is not None or progress.is_aborted:
                queue.drop(progress.key)
                slot.finished += is_finished
                has_moved = True
        slot.is_stalled = report.stop in ("idle", "bound") and not has_moved
        queue.observe(report)

    def _on_switched(self, record: SwitchRecord, now_s: float, out: list[Effect]) -> None:
        slot = self._finish_command("activate")
        if record.model != slot.model:
            raise InvariantBroken(f"switched to {record.model!r}, not {slot.model!r}")
        self._active = record.model
        slot.switch_s = now_s - slot.began_s
        slot.switch_path = record.path
        slot.switch_bytes = record.moved_bytes
        if record.path != "none":
            self._queues[slot.model].timing_model.observe_switch(record.seconds)
        self._open(slot, now_s, out)

    def _on_failed(self, now_s: float, out: list[Effect]) -> None:
        was_switching = self._outstanding == "activate"
        slot = self._finish_command(self._outstanding)
        if was_switching:
            self._active = None
            slot.switch_s = now_s - slot.began_s
            slot.mark_s = now_s
        self._close(slot, CloseReason.FAILED, now_s, out)

    def _on_timing(self, event: TimingChanged) -> None:
        queue = self._queues[event.timing.model]
        queue.timing_model = TimingModel(event.timing)
        queue.blocks_max = event.blocks_max
        if event.is_active and self._slot is None:
            self._active = event.timing.model

    def _retry(self) -> None:
        if self._slot is not None and self._outstanding is None:
            self._slot.is_stalled = False

    def _finish_command(self, command: Literal["activate", "run"] | None) -> Slot:
        if command is None or self._outstanding != command or self._slot is None:
            raise InvariantBroken(f"{command} ended, {self._outstanding} is outstanding")
        self._outstanding = None
        self._is_interrupted = False
        return self._slot

    # --- rounds ---------------------------------------------------------------------------------

    def _advance(self, now_s: float, out: list[Effect]) -> None:
        """Go on until a command is outstanding or there is nothing to do but wait."""
        while self._outstanding is None:
            if self._slot is not None:
                if not self._continue(self._slot, now_s, out):
                    return
            elif (model := self._next_model(out)) is None:
                return
            else:
                self._begin(model, now_s, out)

    @property
    def _has_work(self) -> bool:
        return any(queue.has_work for queue in self._queues.values())

    def _gets_slot(self, model: str) -> bool:
        """Whether a model is in the ring now: idle ones only in a static ring."""
        return self._policy.ring == "static" or self._queues[model].has_work

    def _is_due_elsewhere(self, model: str) -> bool:
        """Whether another model waits for a slot."""
        return self._has_work and any(self._gets_slot(m) for m in self._models if m != model)

    def _next_model(self, out: list[Effect]) -> str | None:
        if not self._has_work:
            self._round_left = []
            return None
        while self._round_left:
            model = self._round_left.pop(0)
            if self._gets_slot(model):
                return model
        order = [m for m in ring_order(self._models, self._last_served) if self._gets_slot(m)]
        self._round_n += 1
        self._slot_s = slot_s(self._config, order, self._active, self._timings)
        planned = RoundPlanned(
            round_n=self._round_n,
            models=tuple(order),
            round_s=self._config.round_s,
            slot_s=self._slot_s,
        )
        out.append(planned)
        self._round_left = order[1:]
        return order[0]

    @property
    def _timings(self) -> dict[str, ModelTiming]:
        return {m: queue.timing for m, queue in self._queues.items()}

    def _begin(self, model: str, now_s: float, out: list[Effect]) -> None:
        self._slots += 1
        self._slot = slot = Slot(
            n=self._slots,
            round_n=self._round_n,
            model=model,
            began_s=now_s,
            mark_s=now_s,
            plan=plan_slot(self._config, self._queues[model].timing, self._slot_s),
        )
        if model == self._active:
            self._open(slot, now_s, out)
        else:
            self._outstanding = "activate"
            out.append(Activate(model=model))

    # --- slots ----------------------------------------------------------------------------------

    def _open(self, slot: Slot, now_s: float, out: list[Effect]) -> None:
        """The model is active: resume what was paused and take P."""
        queue = self._queues[slot.model]
        slot.is_open = True
        slot.opened_s = slot.mark_s = now_s
        slot.p_arrival_n = self._arrivals
        self._last_served = slot.model
        if queue.has_work:
            queue.unmet.append(slot.plan.unmet_iterations)
        opened = SlotOpened(
            n=slot.n,
            round_n=slot.round_n,
            model=slot.model,
            budget_s=slot.plan.budget_s,
            reserved_iterations=slot.plan.reserved_iterations,
            unmet_iterations=slot.plan.unmet_iterations,
            resumed=tuple(queue.running),
        )
        out.append(opened)
        batch = ordinary_batch(queue, slot.plan, self._config)
        if batch:
            slot.prefilled = len(batch)
            for key in batch:
                queue.admit(key)
            out.append(Admit(keys=batch, phase="P"))

    def _continue(self, slot: Slot, now_s: float, out: list[Effect]) -> bool:
        """At a decode boundary: SP, then close, run or linger; False to wait."""
        queue = self._queues[slot.model]
        if self._policy.session_prefill and not slot.is_final:
            self._session_prefill(slot, queue, now_s, out)
        if queue.running:
            slot.linger_since_s = None
        elif slot.linger_since_s is None:
            slot.linger_since_s = now_s
        because = self._reason_to_close(slot, queue, now_s)
        if because is not None:
            self._close(slot, because, now_s, out)
            return True
        if not queue.running:
            self._wake_wanted_s = self._rules.linger_end_s(slot)
            return False
        if slot.is_stalled:
            self._wake_wanted_s = slot.mark_s + self._config.retry_s
            return False
        self._run(slot, now_s, out)
        return True

    def _session_prefill(
        self, slot: Slot, queue: ModelQueue, now_s: float, out: list[Effect]
    ) -> None:
        if not queue.running:
            slot.relax(now_s)
        look = session_prefill(slot, queue, self._config, now_s)
        for key, because in look.parked:
            if key not in slot.parked:
                slot.parked[key] = because
                out.append(Parked(key=key, because=because))
        if look.admitted:
            for key in look.admitted:
                queue.admit(key)
            slot.account("idle", now_s)
            slot.has_session_prefill = True
            slot.is_stalled = False
            slot.sp_admitted += len(look.admitted)
            out.append(Admit(keys=look.admitted, phase="SP"))

    def _reason_to_close(self, slot: Slot, queue: ModelQueue, now_s: float) -> CloseReason | None:
        is_due = self._is_due_elsewhere(slot.model)
        if not queue.running:
            return self._rules.when_empty(slot, now_s, has_work=self._has_work, is_due=is_due)
        if is_due:
            return self._rules.when_due(slot, queue, now_s)
        if slot.has_run and self._would_renew(slot.model, queue):
            return CloseReason.RENEWED
        return self._rules.when_alone(slot, now_s)

    def _would_renew(self, model: str, queue: ModelQueue) -> bool:
        """Whether a new slot of a lone model would take a call that waits."""
        if not self._config.renew_when_alone or not queue.waiting:
            return False
        budget_s = slot_s(self._config, [model], self._active, self._timings)
        plan = plan_slot(self._config, queue.timing, budget_s)
        return bool(ordinary_batch(queue, plan, self._config))

    def _run(self, slot: Slot, now_s: float, out: list[Effect]) -> None:
        slot.account("idle", now_s)
        free_s = slot.free_s(now_s)
        if not slot.is_final and free_s < TIME_GRAIN_S:
            slot.is_final = True
            slot.final_end_s = now_s + slot.protected_left_s
        iterations = self._config.sp_check_every
        if slot.is_final or self._rules.closes_when_protected:
            iterations = min(iterations, slot.protected_left)
        quantum = Quantum(
            model=slot.model,
            max_decode_iterations=iterations,
            max_prefill_tokens=0 if slot.is_final else self._config.prefill_tokens_max,
            max_s=slot.final_end_s - now_s if slot.is_final else free_s,
        )
        self._outstanding = "run"
        out.append(Run(quantum=quantum))

    def _close(self, slot: Slot, because: CloseReason, now_s: float, out: list[Effect]) -> None:
        paused = tuple(self._queues[slot.model].running)
        out.append(slot.closed(now_s, paused, because))
        slot.check()
        self._slot = None

    def _set_wake(self, out: list[Effect]) -> None:
        wanted_s = self._wake_wanted_s
        if wanted_s == self._wake_at_s:
            return
        self._wake_at_s = wanted_s
        out.append(CancelWake() if wanted_s is None else WakeAt(at_s=wanted_s))

    # --- what others may know -------------------------------------------------------------------

    @property
    def round_s(self) -> float:
        """Planned length of the current round; 0 when idle."""
        return 0.0 if self._slot is None else self._config.round_s

    def remaining_s(self, model: str) -> float:
        """Predicted work of a model's calls."""
        return self._queues[model].remaining_s(self._config.batch_max)

    def queued_s(self, model: str) -> float:
        """Predicted work ahead of a call of a model that arrives now."""
        return self._queues[model].queued_s(self._config.batch_max)

    def next_slot_s(self, model: str, now_s: float) -> float:
        """Predicted wait for a model's next slot, without its own switch; 0 when it has one."""
        slot = self._slot
        if slot is None or (slot.model == model and not slot.is_final):
            return 0.0
        wait_s = slot.left_s(now_s, self._queues[slot.model].timing.switch_s)
        for other in ring_order(self._models, slot.model):
            if other == model:
                break
            if self._gets_slot(other):
                wait_s += self._queues[other].timing.switch_s + self._slot_s
        return wait_s

    def check(self) -> None:
        """Raise InvariantBroken if the tables contradict each other."""
        if self._outstanding is not None and self._slot is None:
            raise InvariantBroken(f"{self._outstanding} is outstanding without a slot")
        if self._outstanding == "run" and self._slot and self._slot.model != self._active:
            raise InvariantBroken(f"{self._slot.model!r} runs while {self._active!r} is active")
        for model, queue in self._queues.items():
            if both := queue.waiting.keys() & queue.running.keys():
                raise InvariantBroken(f"{model}: {both} wait and run")
        if self._slot is not None:
            self._slot.check()
