"""Whatever arrives, leaves and takes however long: what holds for every schedule.

A toy engine in virtual time stands behind the scheduler; hypothesis chooses arrivals, aborts at any
moment, and how time passes. After each run the recording is replayed through a fresh scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from talaria_common.perf import ModelTiming
from talaria_common.policies import policy_set
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import (
    CallProgress,
    Quantum,
    StepReport,
    StopReason,
    SwitchRecord,
)
from talaria_instance.events import (
    RECORDED,
    Activate,
    Admit,
    CallAborted,
    CallQueued,
    CancelWake,
    Effect,
    Event,
    Interrupt,
    Parked,
    RecordedStep,
    RoundPlanned,
    Run,
    SlotClosed,
    SlotOpened,
    Stepped,
    Switched,
    Tick,
    TimingChanged,
    WakeAt,
)
from talaria_instance.rounds import SchedulerConfig
from talaria_instance.scheduler import Scheduler

MODELS: Final = ("a", "b", "c")
CONFIG: Final = SchedulerConfig(
    t_ttft_s=4.0, t_tpot_s=0.1, sp_check_every=4, batch_max=4, sp_prefill_tokens_max=1500
)
POLICIES: Final = (
    "talaria",
    "talaria",  # drawn twice as often: it has the most rules
    "no-hkvr",
    "no-sp",
    "no-sp+slot_close=protected",
    "talaria+ring=static",
    "round-only",
    "round-only+ring=static",
)
SWITCH_S: Final = 0.3
CHUNK_TOKENS: Final = 200
BLOCKS_MAX: Final = 40


def an_arrival(
    model: str, prompt_tokens: int, output_tokens: int, blocks: int, kind: str
) -> CallQueued:
    held = prompt_tokens - 1
    return CallQueued(
        key=CallKey("not yet"),
        model=model,
        prompt_tokens=prompt_tokens,
        device_tokens=held if kind in ("device", "shared") else 0,
        host_tokens=held if kind == "host" else 0,
        output_tokens=output_tokens,
        blocks=blocks,
        is_continuation=kind not in ("new", "shared"),
    )


ARRIVALS: Final = st.builds(
    an_arrival,
    model=st.sampled_from(MODELS),
    prompt_tokens=st.integers(1, 1500),
    output_tokens=st.integers(1, 60),
    blocks=st.integers(1, BLOCKS_MAX),
    kind=st.sampled_from(("new", "shared", "device", "host", "lost")),
)


@dataclass
class ToySequence:
    key: CallKey
    prefill_left: int
    output_left: int


@dataclass
class ToyRun:
    quantum: Quantum
    started_s: float
    iterations: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    is_woken: bool = False
    progress: dict[CallKey, CallProgress] = field(default_factory=dict)


class ToyEngine:
    """Prefills in chunks and decodes all others, one token an iteration, in virtual time."""

    def __init__(self) -> None:
        self.active: str | None = None
        self.sequences: dict[str, dict[CallKey, ToySequence]] = {m: {} for m in MODELS}
        self.switching: tuple[str, float] | None = None
        self.run: ToyRun | None = None
        self.iteration_end_s = 0.0
        self.chunk: tuple[ToySequence, int] | None = None

    @property
    def next_s(self) -> float | None:
        if self.switching is not None:
            return self.switching[1]
        return None if self.run is None else self.iteration_end_s

    def start_switch(self, model: str, now_s: float) -> None:
        assert self.switching is None
        assert self.run is None
        self.switching = (model, now_s + SWITCH_S)

    def start_run(self, quantum: Quantum, now_s: float) -> None:
        assert self.switching is None
        assert self.run is None
        assert quantum.model == self.active
        self.run = ToyRun(quantum, now_s)
        self._begin_iteration(now_s)

    def proceed(self) -> Event | None:
        """Reach `next_s`; the event that it brings, if any."""
        if self.switching is not None:
            self.active, _ = self.switching
            self.switching = None
            return Switched(record=SwitchRecord(model=self.active, seconds=SWITCH_S))
        assert self.run is not None
        now_s = self.iteration_end_s
        stop = self._end_iteration() or self._bound(now_s)
        if stop is None:
            self._begin_iteration(now_s)
            return None
        run, self.run = self.run, None
        report = StepReport(
            model=run.quantum.model,
            stop=stop,
            iterations=run.iterations,
            seconds=now_s - run.started_s,
            prefill_s=run.prefill_s,
            decode_s=run.decode_s,
            prefill_tokens=run.prefill_tokens,
            calls=tuple(run.progress.values()),
        )
        return Stepped(report=report)

    def _live(self) -> list[ToySequence]:
        assert self.active is not None
        return list(self.sequences[self.active].values())

    def _begin_iteration(self, now_s: float) -> None:
        assert self.run is not None
        left = self.run.quantum.max_prefill_tokens - self.run.prefill_tokens
        prefilling = next((s for s in self._live() if s.prefill_left), None)
        tokens = min(CHUNK_TOKENS, left, prefilling.prefill_left) if prefilling else 0
        self.chunk = (prefilling, tokens) if prefilling and tokens > 0 else None
        decodes = any(not s.prefill_left for s in self._live())
        self.iteration_end_s = now_s + tokens * 0.001 + decodes * 0.02

    def _end_iteration(self) -> StopReason | None:
        run = self.run
        assert run is not None
        decoding = [s for s in self._live() if not s.prefill_left]
        if self.chunk is None and not decoding:
            return "idle"
        if self.chunk is not None:
            sequence, tokens = self.chunk
            sequence.prefill_left -= tokens
            run.prefill_tokens += tokens
            run.prefill_s += tokens * 0.001
            self._note(sequence, prefilled=tokens)
        if decoding:
            run.iterations += 1
            run.decode_s += 0.02
        has_finished = False
        for sequence in decoding:
            sequence.output_left -= 1
            self._note(sequence, new=1)
            if not sequence.output_left:
                has_finished = True
                del self.sequences[run.quantum.model][sequence.key]
        return "finished" if has_finished else None

    def _bound(self, now_s: float) -> StopReason | None:
        run = self.run
        assert run is not None
        if run.is_woken:
            return "woken"
        is_over = now_s - run.started_s >= run.quantum.max_s
        return "bound" if is_over or run.iterations >= run.quantum.max_decode_iterations else None

    def _note(self, sequence: ToySequence, *, new: int = 0, prefilled: int = 0) -> None:
        assert self.run is not None
        old = self.run.progress.get(sequence.key, CallProgress(key=sequence.key))
        self.run.progress[sequence.key] = CallProgress(
            key=sequence.key,
            new_tokens=old.new_tokens + new,
            prefilled_tokens=old.prefilled_tokens + prefilled,
            remaining_prefill=sequence.prefill_left,
            finish=None if sequence.output_left else "stop",
        )


@dataclass
class Known:
    call: CallQueued
    queued_s: float
    ends: int = 0
    is_admitted: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """Plays shell and engine, and checks every effect."""

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.policy = policy_set(policy)
        self.scheduler = Scheduler(CONFIG, self.policy, MODELS)
        self.engine = ToyEngine()
        self.now_s = 0.0
        self.wake_at_s: float | None = None
        self.calls: dict[CallKey, Known] = {}
        self.p_taken_s = 0.0
        self.closed_s = 0.0
        self.closed: list[SlotClosed] = []
        self.recording: list[bytes] = []
        for model in MODELS:
            timing = ModelTiming(model=model, switch_s=SWITCH_S)
            self.apply(TimingChanged(timing=timing, blocks_max=BLOCKS_MAX))

    # --- what happens ---------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def arrive(self, arrivals: list[CallQueued]) -> None:
        for arrival in arrivals:
            call = msgspec.structs.replace(arrival, key=CallKey(f"c{len(self.calls)}"))
            self.calls[call.key] = Known(call, self.now_s)
            self.apply(call)

    @precondition(lambda self: self.engine.run is not None)
    @rule(arrival=ARRIVALS, iterations=st.integers(0, 3))
    def arrive_mid_slot(self, arrival: CallQueued, iterations: int) -> None:
        self.the_engine_goes_on(iterations)
        model = self.engine.active or MODELS[0]
        self.arrive([msgspec.structs.replace(arrival, model=model)])

    @precondition(lambda self: any(not k.ends for k in self.calls.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, known in self.calls.items() if not known.ends]))
        self.calls[key].ends += 1
        for sequences in self.engine.sequences.values():
            sequences.pop(key, None)
        self.apply(CallAborted(key=key))

    @rule(seconds=st.floats(0.001, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.run_until(self.now_s + seconds)

    @rule(times=st.integers(1, 5))
    def the_engine_goes_on(self, times: int) -> None:
        for _ in range(times):
            if self.engine.next_s is not None:
                self.run_until(self.engine.next_s)

    def run_until(self, until_s: float) -> None:
        for _ in range(100_000):
            at_s = min(
                (t for t in (self.engine.next_s, self.wake_at_s) if t is not None), default=None
            )
            if at_s is None or at_s > until_s:
                break
            self.now_s = max(self.now_s, at_s)
            if at_s == self.engine.next_s:
                event = self.engine.proceed()
                if event is not None:
                    self.apply(event)
            else:
                self.wake_at_s = None
                self.apply(Tick())
        else:
            raise AssertionError("time does not pass")
        self.now_s = max(self.now_s, until_s)

    # --- what must hold -------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        if isinstance(event, Stepped):
            for progress in event.report.calls:
                if progress.finish is not None:
                    self.calls[progress.key].ends += 1
        effects = self.scheduler.step(event, self.now_s)
        self.scheduler.check()
        step = RecordedStep(now_s=self.now_s, event=event, effects=effects)
        self.recording.append(msgspec.json.encode(step))
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Activate(model=model):
                self.engine.start_switch(model, self.now_s)
            case Run(quantum=quantum):
                assert quantum.max_s > 0
                assert quantum.max_decode_iterations > 0
                self.engine.start_run(quantum, self.now_s)
            case Admit():
                self.admit(effect)
            case Interrupt():
                assert self.engine.run is not None
                self.engine.run.is_woken = True
            case WakeAt(at_s=at_s):
                self.wake_at_s = at_s
            case CancelWake():
                self.wake_at_s = None
            case SlotOpened():
                self.p_taken_s = self.now_s
                self.check_p(effect)
            case SlotClosed():
                self.check_slot(effect)
            case Parked() | RoundPlanned():
                pass

    def admit(self, admit: Admit) -> None:
        queue = self.scheduler.queues[self.engine.active or ""]
        if admit.phase == "P" and queue.waiting:
            first_left = next(iter(queue.waiting))
            assert max(self.number(k) for k in admit.keys) < self.number(first_left)
        for key in admit.keys:
            known = self.calls[key]
            assert not known.ends
            assert not known.is_admitted
            known.is_admitted = True
            call = known.call
            assert call.model == self.engine.active
            if admit.phase == "SP":
                assert self.policy.session_prefill
                assert call.is_continuation
                assert call.device_tokens + call.host_tokens > 0
                assert known.queued_s >= self.p_taken_s
            new_tokens = max(1, call.prompt_tokens - call.device_tokens - call.host_tokens)
            self.engine.sequences[call.model][key] = ToySequence(
                key, new_tokens, call.output_tokens
            )
        model = self.engine.active
        assert model is not None
        held = list(self.engine.sequences[model])
        assert len(held) <= CONFIG.batch_max
        blocks = sum(self.calls[k].call.blocks for k in held)
        assert blocks <= BLOCKS_MAX

    @staticmethod
    def number(key: CallKey) -> int:
        """Calls are named in order of arrival."""
        return int(key.call_id[1:])

    def check_p(self, opened: SlotOpened) -> None:
        """The head of the queue enters at its model's slot unless there is a stated reason."""
        queue = self.scheduler.queues[opened.model]
        entered = any(key not in opened.resumed for key in queue.running)
        if not queue.waiting or entered:
            return
        head = next(iter(queue.waiting.values()))
        blocks, sequences = queue.room(CONFIG.batch_max)
        assert queue.prefill_left or head.call.blocks > blocks or sequences < 1

    def check_slot(self, slot: SlotClosed) -> None:
        """Phases and switch add up to the wall time, and slots do not overlap."""
        known_s = slot.switch_s + sum(seconds for _, seconds in slot.phases)
        assert abs(known_s - slot.wall_s) < 1e-6
        assert self.now_s - slot.wall_s >= self.closed_s - 1e-6
        self.closed_s = self.now_s
        self.closed.append(slot)

    @invariant()
    def one_round_serves_a_model_once(self) -> None:
        if not hasattr(self, "closed"):
            return
        rounds = [(slot.round_n, slot.model) for slot in self.closed]
        assert len(set(rounds)) == len(rounds)

    def teardown(self) -> None:
        if not hasattr(self, "calls"):
            return
        horizon_s = self.now_s + 60.0 + 30.0 * len(self.calls)
        while any(not known.ends for known in self.calls.values()):
            assert self.now_s < horizon_s, "calls starve"
            self.run_until(self.now_s + 5.0)
        self.run_until(self.now_s + 5.0)
        assert all(known.ends == 1 for known in self.calls.values())
        assert self.engine.next_s is None, "the engine runs for nobody"
        self.check_recording()

    def check_recording(self) -> None:
        fresh = Scheduler(CONFIG, self.policy, MODELS)
        for line in self.recording:
            step = RECORDED.decode(line)
            assert fresh.step(step.event, step.now_s) == step.effects


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
