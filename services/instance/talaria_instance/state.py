"""The scheduler's tables: what waits, what the engine holds, the open slot. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from talaria_common.errors import InvariantBroken
from talaria_common.perf import ModelTiming, TimingModel
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import CallProgress, StepReport
from talaria_instance.events import CallQueued, CloseReason, ParkReason, Phase, SlotClosed
from talaria_instance.rounds import SlotPlan

PHASES_KEPT: Final = 64
"""Phases listed apart in a slot's record; later ones are added to the last of their kind."""
RISK_SLOTS: Final = 8
"""Slots that the deadline-risk counter looks back on."""


@dataclass
class Waiting:
    """A call in its model's queue."""

    call: CallQueued
    arrival_n: int
    """Order of arrival on this instance."""

    @property
    def is_returning(self) -> bool:
        """A continuation whose prefix is here, on the device or the host."""
        return self.call.is_continuation and (self.call.device_tokens + self.call.host_tokens) > 0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens to compute; at least the last one."""
        reusable = self.call.device_tokens + self.call.host_tokens
        return max(1, self.call.prompt_tokens - reusable)

    def start_s(self, timing: ModelTiming) -> float:
        """Predicted restore and prefill."""
        return timing.restore_s(self.call.host_tokens) + timing.prefill_s(self.new_tokens)


@dataclass
class Running:
    """A call that the engine holds: running, or paused while another model is active."""

    call: CallQueued
    prefill_left: int
    tokens: int = 0

    def advance(self, progress: CallProgress) -> None:
        """Note what one run did for it."""
        self.tokens += progress.new_tokens
        self.prefill_left = 0 if self.tokens else progress.remaining_prefill

    @property
    def output_left(self) -> int:
        """Expected tokens to come; at least one."""
        return max(1, self.call.output_tokens - self.tokens)


@dataclass
class ModelQueue:
    """One model's calls and facts."""

    timing_model: TimingModel
    blocks_max: int = 0
    waiting: dict[CallKey, Waiting] = field(default_factory=dict)
    """In order of arrival."""
    running: dict[CallKey, Running] = field(default_factory=dict)
    """In order of admission: the oldest resumes first."""
    unmet: deque[int] = field(default_factory=lambda: deque(maxlen=RISK_SLOTS))

    @property
    def timing(self) -> ModelTiming:
        return self.timing_model.timing

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def deadline_risk(self) -> int:
        """Reserved iterations that the last few slots could not carry."""
        return sum(self.unmet)

    @property
    def blocks_held(self) -> int:
        """Blocks that admitted calls may come to use."""
        return sum(r.call.blocks for r in self.running.values())

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that admitted calls still have to compute."""
        return sum(r.prefill_left for r in self.running.values())

    @property
    def prefill_left_s(self) -> float:
        """Predicted seconds of unfinished prefills."""
        timing = self.timing
        return sum(timing.prefill_s(r.prefill_left) for r in self.running.values())

    def room(self, batch_max: int) -> tuple[int, int]:
        """Blocks and sequences that may still be admitted."""
        return self.blocks_max - self.blocks_held, batch_max - len(self.running)

    def admit(self, key: CallKey) -> None:
        """Move a waiting call to the engine's."""
        waiting = self.waiting.pop(key)
        self.running[key] = Running(waiting.call, prefill_left=waiting.new_tokens)

    def drop(self, key: CallKey) -> bool:
        """Forget a call; False if it is not here."""
        return self.waiting.pop(key, None) is not None or self.running.pop(key, None) is not None

    def remaining_s(self, batch_max: int) -> float:
        """Predicted work of all its calls: restores and prefills, and batched decode."""
        timing = self.timing
        start_s = sum(w.start_s(timing) for w in self.waiting.values()) + self.prefill_left_s
        tokens = sum(max(1, w.call.output_tokens) for w in self.waiting.values())
        tokens += sum(r.output_left for r in self.running.values())
        batch = min(batch_max, len(self.waiting) + len(self.running))
        return start_s + timing.decode_s(tokens, batch)

    def queued_s(self, batch_max: int) -> float:
        """Predicted work before the prefill of a call that arrives now.

        Decode is shared with those who join: it is waited for only while batch or blocks are full.
        """
        blocks, sequences = self.room(batch_max)
        wanted = sum(w.call.blocks for w in self.waiting.values())
        if len(self.waiting) >= sequences or (self.blocks_max and wanted >= blocks):
            return self.remaining_s(batch_max)
        timing = self.timing
        return sum(w.start_s(timing) for w in self.waiting.values()) + self.prefill_left_s

    def observe(self, report: StepReport) -> None:
        """Learn the times of one run."""
        calls = sum(1 for progress in report.calls if progress.prefilled_tokens > 0)
        self.timing_model.observe_prefill(
            report.prefill_s, tokens=report.prefill_tokens, calls=max(calls, 1)
        )
        self.timing_model.observe_decode(report.decode_s, iterations=report.iterations)
        self.timing_model.observe_restore(report.restore_s, tokens=report.restored_tokens)


@dataclass
class Slot:
    """The open slot, or the one whose switch is under way."""

    n: int
    round_n: int
    model: str
    began_s: float
    """Start of the switch."""
    mark_s: float
    """Up to here time is accounted for."""
    plan: SlotPlan
    switch_s: float = 0.0
    switch_path: str = ""
    switch_bytes: int = 0
    is_open: bool = False
    opened_s: float = 0.0
    p_arrival_n: int = 0
    """Calls that arrived later came after P was taken."""
    is_final: bool = False
    """Dfin: no new prefill."""
    final_end_s: float = 0.0
    has_run: bool = False
    is_stalled: bool = False
    """The engine's last run found nothing that it could do."""
    linger_since_s: float | None = None
    phases: list[tuple[Phase, float]] = field(default_factory=list)
    has_session_prefill: bool = False
    prefilled: int = 0
    sp_admitted: int = 0
    parked: dict[CallKey, ParkReason] = field(default_factory=dict)
    tokens: int = 0
    iterations: int = 0
    finished: int = 0

    @property
    def end_s(self) -> float:
        """Planned end."""
        return self.opened_s + self.plan.budget_s

    @property
    def protected_left(self) -> int:
        """Reserved iterations not spent yet."""
        return max(0, self.plan.reserved_iterations - self.iterations)

    @property
    def protected_left_s(self) -> float:
        """Seconds of protected decode not spent yet."""
        return self.plan.protected_s * self.protected_left / self.plan.reserved_iterations

    def left_s(self, now_s: float, switch_s: float) -> float:
        """Until its planned end, what is left of a switch of `switch_s` included."""
        if self.is_open:
            return max(0.0, self.end_s - now_s)
        return max(0.0, self.began_s + switch_s - now_s) + self.plan.budget_s

    def free_s(self, now_s: float) -> float:
        """What is left of the budget beside protected decode; negative when it is overdrawn."""
        return self.end_s - now_s - self.protected_left_s

    def relax(self, now_s: float) -> None:
        """Nobody decodes here now: who comes next finds at most half of what is left protected."""
        step_s = self.plan.protected_s / self.plan.reserved_iterations
        kept = math.floor(max(0.0, self.end_s - now_s) / 2 / step_s)
        reserved = max(1, self.iterations + kept)
        if reserved < self.plan.reserved_iterations:
            self.plan = msgspec.structs.replace(
                self.plan, reserved_iterations=reserved, protected_s=reserved * step_s
            )

    def account(self, phase: Phase, until_s: float) -> None:
        """Give the time since the last mark to a phase."""
        seconds = until_s - self.mark_s
        self.mark_s = until_s
        if seconds <= 0:
            return
        if self.phases and self.phases[-1][0] == phase:
            self.phases[-1] = (phase, self.phases[-1][1] + seconds)
        elif len(self.phases) < PHASES_KEPT:
            self.phases.append((phase, seconds))
        else:
            at = max((n for n, p in enumerate(self.phases) if p[0] == phase), default=-1)
            kept = self.phases[at]
            self.phases[at] = (kept[0], kept[1] + seconds)

    def account_run(self, report: StepReport, until_s: float) -> None:
        """Split one run between its prefill phase and its decode phase."""
        start_s = report.prefill_s + report.restore_s
        if start_s > 0:
            share_s = until_s - self.mark_s if not report.iterations else start_s
            middle_s = min(until_s, self.mark_s + share_s)
            self.account("SP" if self.has_session_prefill else "P", middle_s)
        self.account(self.decode_phase if report.iterations or start_s else "idle", until_s)

    @property
    def decode_phase(self) -> Phase:
        """Which decode phase the slot is in."""
        if self.is_final:
            return "Dfin"
        return "D" if self.has_session_prefill else "D1"

    def phase(self, queue: ModelQueue) -> str:
        """What the slot is doing, for those who look on; `switch` before it is open."""
        if not self.is_open:
            return "switch"
        if not queue.running:
            return "idle"
        if queue.prefill_left and not self.is_final:
            return "SP" if self.has_session_prefill else "P"
        return self.decode_phase

    def closed(self, now_s: float, paused: tuple[CallKey, ...], because: CloseReason) -> SlotClosed:
        """The record of the slot, all time up to `now_s` accounted for."""
        self.account("idle", now_s)
        return SlotClosed(
            n=self.n,
            round_n=self.round_n,
            model=self.model,
            wall_s=now_s - self.began_s,
            switch_s=self.switch_s,
            phases=tuple(self.phases),
            prefilled=self.prefilled,
            sp_admitted=self.sp_admitted,
            sp_parked=len(self.parked),
            tokens=self.tokens,
            iterations=self.iterations,
            paused=paused,
            closed_because=because,
            switch_path=self.switch_path,
            switch_bytes=self.switch_bytes,
        )

    def check(self) -> None:
        """Slots conserve time: switch and phases add up to what has passed."""
        passed_s = self.mark_s - self.began_s
        known_s = self.switch_s + sum(seconds for _, seconds in self.phases)
        if self.is_open and abs(passed_s - known_s) > 1e-6:
            raise InvariantBroken(f"slot {self.n}: {passed_s} s passed, {known_s} s known")
