"""Rounds and slots: events in, effects out, numbers worked out by hand.

Unless a test says otherwise: R = 0.8 * 10 = 8 s; T_TPOT = 0.1 s, so d_m = 8 / 0.1 = 80 iterations;
a switch takes 0.5 s, a decode step 0.02 s, a prefill 0.1 s + 1 ms/token, a restore 0.1 ms/token.
Two models with work: slots of (8 - 2 * 0.5) / 2 = 3.5 s, of which 80 * 0.02 = 1.6 s are protected
(half a slot is 1.75 s), so 1.9 s are left for prefills. One model alone: a slot of 7.5 s, and of
8 s if it is active already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import pytest

from talaria_common.errors import InvariantBroken
from talaria_common.perf import ModelTiming
from talaria_common.policies import PolicySet, policy_set
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import (
    CallProgress,
    FinishReason,
    StepReport,
    StopReason,
    SwitchRecord,
)
from talaria_instance.events import (
    Activate,
    Admit,
    CallAborted,
    CallQueued,
    CloseReason,
    CommandFailed,
    Effect,
    Event,
    Interrupt,
    Parked,
    ParkReason,
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

T = TypeVar("T")

SP = policy_set("talaria")
NO_SP = policy_set("no-sp")
CONFIG = SchedulerConfig(t_ttft_s=10.0, gamma=0.8, t_tpot_s=0.1)


def a_timing(model: str, **terms: float) -> ModelTiming:
    defaults = {
        "prefill_fixed_s": 0.1,
        "prefill_token_s": 0.001,
        "decode_step_s": 0.02,
        "restore_token_s": 0.0001,
        "switch_s": 0.5,
    }
    return ModelTiming(model=model, **(defaults | terms))


class Bench:
    """A scheduler and a hand-moved clock; the test plays the engine."""

    def __init__(
        self,
        policy: PolicySet = SP,
        *,
        models: Iterable[str] = ("a", "b"),
        blocks_max: int = 1000,
        config: SchedulerConfig = CONFIG,
        **terms: float,
    ) -> None:
        self.now_s = 100.0
        self.scheduler = Scheduler(config, policy, tuple(models))
        for model in models:
            timing = a_timing(model, **terms)
            self.step(TimingChanged(timing=timing, blocks_max=blocks_max))

    def step(self, event: Event, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        effects = self.scheduler.step(event, self.now_s)
        self.scheduler.check()
        return effects

    def queue(
        self, name: str, model: str = "a", after_s: float = 0.0, **fields: Any
    ) -> list[Effect]:
        call = CallQueued(
            key=CallKey(name),
            model=model,
            prompt_tokens=fields.pop("prompt_tokens", 100),
            output_tokens=fields.pop("output_tokens", 50),
            blocks=fields.pop("blocks", 10),
            **fields,
        )
        return self.step(call, after_s)

    def a_return(
        self, name: str, model: str = "a", after_s: float = 0.0, **fields: Any
    ) -> list[Effect]:
        fields = {"device_tokens": 90, "is_continuation": True} | fields
        return self.queue(name, model, after_s, **fields)

    def switched(self, model: str = "a", after_s: float = 0.5) -> list[Effect]:
        return self.step(Switched(record=SwitchRecord(model=model, seconds=after_s)), after_s)

    def stepped(
        self,
        *calls: CallProgress,
        after_s: float,
        iterations: int = 0,
        stop: StopReason = "bound",
        **fields: Any,
    ) -> list[Effect]:
        fields.setdefault("decode_s", iterations * 0.02)
        assert self.scheduler.active is not None
        report = StepReport(
            model=self.scheduler.active,
            stop=stop,
            iterations=iterations,
            seconds=after_s,
            calls=calls,
            **fields,
        )
        return self.step(Stepped(report=report), after_s)

    def prefilled(self, *names: str, after_s: float = 0.2, tokens: int = 100) -> list[Effect]:
        calls = [CallProgress(key=CallKey(n), new_tokens=1, prefilled_tokens=tokens) for n in names]
        return self.stepped(
            *calls, after_s=after_s, prefill_s=after_s, prefill_tokens=tokens * len(names)
        )

    def finished(
        self, *names: str, after_s: float = 0.02, finish: FinishReason = "stop"
    ) -> list[Effect]:
        calls = [CallProgress(key=CallKey(n), new_tokens=1, finish=finish) for n in names]
        return self.stepped(*calls, after_s=after_s, iterations=1, stop="finished")


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]


def the(effects: list[Effect], kind: type[T]) -> T:
    (one,) = of(effects, kind)
    return one


def admitted(effects: list[Effect], phase: str) -> list[str]:
    return [k.call_id for e in of(effects, Admit) if e.phase == phase for k in e.keys]


def kinds(effects: list[Effect]) -> list[str]:
    return [type(e).__name__ for e in effects]


def an_open_slot(policy: PolicySet = SP, **bench: Any) -> Bench:
    """Slot of a with one decoding call `a2`; b waits; P took 1.0 s of the slot's 3.5 s."""
    it = Bench(policy, models=("a", "b", "z"), **bench)
    it.queue("z1", "z")
    it.queue("a2", "a", prompt_tokens=900)
    it.queue("b2", "b")
    it.step(CallAborted(key=CallKey("z1")))
    assert the(it.switched("z"), RoundPlanned).models == ("a", "b")
    it.switched("a")
    it.prefilled("a2", after_s=1.0, tokens=900)
    return it


# --- rounds -------------------------------------------------------------------------------------


def test_the_first_call_opens_a_round_at_once() -> None:
    it = Bench()
    effects = it.queue("a1", "a")
    assert kinds(effects) == ["RoundPlanned", "Activate"]
    assert the(effects, RoundPlanned).models == ("a",)


def test_a_model_that_is_active_gets_its_slot_without_a_switch() -> None:
    it = Bench()
    it.step(TimingChanged(timing=a_timing("a"), blocks_max=1000, is_active=True))
    effects = it.queue("a1", "a")
    assert kinds(effects) == ["RoundPlanned", "SlotOpened", "Admit", "Run"]
    assert the(effects, SlotOpened).budget_s == pytest.approx(8.0)


def test_a_round_shares_what_its_switches_leave() -> None:
    """(8 - 2 * 0.5) / 2 = 3.5 s a slot, 80 iterations of 0.02 s protected in each."""
    it = an_open_slot()
    assert it.scheduler.slot is not None
    assert it.scheduler.slot.plan.budget_s == pytest.approx(3.5)
    assert it.scheduler.slot.plan.reserved_iterations == 80


def test_a_round_visits_models_in_ring_order_after_the_last_served() -> None:
    it = Bench(models=("a", "b", "c"))
    it.queue("b1", "b")
    it.queue("a1", "a")
    it.queue("c1", "c")
    it.switched("b")
    it.prefilled("b1")
    effects = it.finished("b1")
    effects += it.step(Tick(), after_s=1.0)
    assert the(effects, RoundPlanned).models == ("c", "a")


def test_slots_have_a_floor() -> None:
    """Eight switches of 0.5 s leave (2.55 - 4) / 8 < 0, so each slot has its 0.5 s."""
    names = tuple("abcdefgh")
    config = SchedulerConfig(t_ttft_s=3.0)
    it = Bench(models=names, config=config)
    for name in names:
        it.queue(f"{name}1", name)
    it.switched("a")
    it.prefilled("a1")
    effects = it.finished("a1") + it.step(Tick(), after_s=1.0)
    assert the(effects, RoundPlanned).slot_s == pytest.approx(0.5)


def test_infeasible_decode_gets_half_a_slot_and_is_reported() -> None:
    """A step of 0.2 s is above T_TPOT: of 80 wanted, half of 7.5 s carries 3.75 / 0.2."""
    it = Bench(decode_step_s=0.2)
    it.queue("a1", "a")
    opened = the(it.switched("a"), SlotOpened)
    assert (opened.reserved_iterations, opened.unmet_iterations) == (18, 62)
    assert it.scheduler.queues["a"].deadline_risk == 62


def test_feasible_decode_that_half_a_slot_cannot_carry_is_reported_too() -> None:
    """A step of 0.08 s is below T_TPOT, but 80 * 0.08 s = 6.4 s > 3.75 s: 46 fit, 34 do not."""
    it = Bench(decode_step_s=0.08)
    it.queue("a1", "a")
    opened = the(it.switched("a"), SlotOpened)
    assert (opened.reserved_iterations, opened.unmet_iterations) == (46, 34)


# --- P ------------------------------------------------------------------------------------------


def test_p_takes_what_fits_beside_protected_decode_in_order() -> None:
    """Alone: 7.5 - 1.6 = 5.9 s. Prefills of 0.1 + 2.6 = 2.7 s: two fit, the third waits."""
    it = Bench()
    for name in ("a1", "a2", "a3"):
        it.queue(name, "a", prompt_tokens=2600)
    assert admitted(it.switched("a"), "P") == ["a1", "a2"]


def test_p_is_never_overtaken_by_a_smaller_call() -> None:
    it = Bench()
    it.queue("a1", "a", prompt_tokens=4000)
    it.queue("a2", "a", prompt_tokens=4000)
    it.queue("a3", "a", prompt_tokens=10)
    assert admitted(it.switched("a"), "P") == ["a1"]


def test_p_takes_one_call_however_long() -> None:
    it = Bench()
    it.queue("a1", "a", prompt_tokens=100_000)
    assert admitted(it.switched("a"), "P") == ["a1"]


def test_p_counts_a_prefix_on_the_host_as_a_restore() -> None:
    """Two times 20000 * 0.0001 + 0.1 + 0.1 = 4.4 s fit 5.9 s; recomputed, they would not."""
    it = Bench()
    for name in ("a1", "a2"):
        it.queue(name, "a", prompt_tokens=20_100, host_tokens=20_000)
    assert admitted(it.switched("a"), "P") == ["a1", "a2"]


def test_p_is_bounded_by_blocks_and_batch() -> None:
    it = Bench(blocks_max=25)
    for name in ("a1", "a2", "a3"):
        it.queue(name, "a", blocks=10)
    assert admitted(it.switched("a"), "P") == ["a1", "a2"]
    it = Bench(config=SchedulerConfig(batch_max=1))
    for name in ("a1", "a2"):
        it.queue(name, "a")
    assert admitted(it.switched("a"), "P") == ["a1"]


def test_a_paused_prefill_comes_before_new_calls() -> None:
    """a1 has 90000 tokens to go, far more than a slot: a2 waits behind it."""
    it = Bench(NO_SP)
    it.queue("a1", "a", prompt_tokens=100_000)
    it.queue("b1", "b")
    it.switched("a")
    it.queue("a2", "a")
    progress = CallProgress(key=CallKey("a1"), prefilled_tokens=10_000, remaining_prefill=90_000)
    effects = it.stepped(progress, after_s=7.0, prefill_s=7.0, prefill_tokens=10_000)
    closed = the(effects, SlotClosed)
    assert closed.closed_because is CloseReason.BUDGET
    assert closed.paused == (CallKey("a1"),)
    it.switched("b")
    it.prefilled("b1")
    it.finished("b1")
    effects = it.switched("a")
    assert the(effects, SlotOpened).resumed == (CallKey("a1"),)
    assert admitted(effects, "P") == []


# --- SP -----------------------------------------------------------------------------------------


def test_a_returned_continuation_enters_the_open_slot_at_the_next_boundary() -> None:
    it = an_open_slot()
    assert kinds(it.a_return("r1")) == ["Interrupt"]
    assert kinds(it.a_return("r2")) == []  # one interrupt a run
    effects = it.stepped(after_s=0.1, iterations=5, stop="woken")
    assert admitted(effects, "SP") == ["r1", "r2"]
    assert kinds(effects) == ["Admit", "Run"]


def test_a_new_session_never_enters_by_session_prefill() -> None:
    it = an_open_slot()
    assert it.queue("n1", "a", device_tokens=90) == []
    effects = it.stepped(after_s=0.16, iterations=8)
    assert kinds(effects) == ["Run"]


def test_a_continuation_without_its_prefix_here_waits_for_p() -> None:
    it = an_open_slot()
    assert it.a_return("r1", device_tokens=0, host_tokens=0) == []
    assert admitted(it.stepped(after_s=0.16, iterations=8), "SP") == []


def test_a_prefix_on_the_host_is_as_good_as_one_on_the_device() -> None:
    it = an_open_slot()
    it.a_return("r1", device_tokens=0, host_tokens=90)
    assert admitted(it.stepped(after_s=0.16, iterations=8), "SP") == ["r1"]


def test_without_the_switch_nobody_enters_mid_slot() -> None:
    it = an_open_slot(NO_SP)
    assert it.a_return("r1") == []
    assert admitted(it.stepped(after_s=0.16, iterations=8), "SP") == []


def test_what_does_not_fit_is_parked_once_with_its_budget() -> None:
    """Left: 3.5 - 1.0 - 0.16 - 72 * 0.02 = 0.9 s; r1 needs 0.1 + 0.91 s, r2 0.1 + 0.01 s."""
    it = an_open_slot()
    it.a_return("r1", prompt_tokens=1000)
    it.a_return("r2")
    effects = it.stepped(after_s=0.16, iterations=8, stop="woken")
    assert the(effects, Parked) == Parked(key=CallKey("r1"), because=ParkReason.TIME)
    assert admitted(effects, "SP") == ["r2"]
    effects = it.prefilled("r2", after_s=0.11, tokens=10)
    assert of(effects, Parked) == []


@pytest.mark.parametrize(
    ("because", "bench", "call"),
    [
        (ParkReason.BLOCKS, {"blocks_max": 30}, {"blocks": 25}),
        (ParkReason.BATCH, {"config": msgspec.structs.replace(CONFIG, batch_max=1)}, {}),
        (
            ParkReason.PREFILL_TOKENS,
            {"config": msgspec.structs.replace(CONFIG, sp_prefill_tokens_max=5)},
            {},
        ),
    ],
)
def test_each_budget_can_park(because: ParkReason, bench: Any, call: Any) -> None:
    it = an_open_slot(**bench)
    it.a_return("r1", **call)
    effects = it.stepped(after_s=0.16, iterations=8, stop="woken")
    assert the(effects, Parked).because is because


def test_a_parked_call_is_taken_by_the_next_p() -> None:
    it = an_open_slot()
    it.a_return("r1", prompt_tokens=3000)
    it.stepped(after_s=0.16, iterations=8, stop="woken")
    closed = the(it.finished("a2") + it.step(Tick(), after_s=1.0), SlotClosed)
    assert closed.sp_parked == 1
    it.switched("b")
    it.prefilled("b2")
    it.finished("b2")
    it.step(Tick(), after_s=1.0)
    assert admitted(it.switched("a"), "P") == ["r1"]


def test_protected_decode_shrinks_when_nobody_decodes() -> None:
    """a2 ends 1.02 s into 3.5 s, with 79 * 0.02 = 1.58 s protected. 0.5 s later 1.98 s are left:
    0.4 s beside all that, 0.99 s beside half of it; r1 needs 0.1 + 0.7 = 0.8 s."""
    it = an_open_slot()
    it.finished("a2")
    effects = it.a_return("r1", after_s=0.5, prompt_tokens=790)
    assert admitted(effects, "SP") == ["r1"]
    assert the(effects, Run).quantum.max_s == pytest.approx(0.99, abs=0.02)


# --- closing ------------------------------------------------------------------------------------


def test_protected_decode_is_spent_before_a_slot_closes() -> None:
    """After P's 1.0 s, 2.5 s are left for 80 iterations of 0.02 s: more than the 80 are done."""
    it = an_open_slot()
    effects = it.stepped(after_s=0.16, iterations=8)
    while not of(effects, SlotClosed):
        n = the(effects, Run).quantum.max_decode_iterations
        effects = it.stepped(after_s=n * 0.02, iterations=n)
    closed = the(effects, SlotClosed)
    assert closed.closed_because is CloseReason.BUDGET
    assert closed.iterations == 128
    assert closed.wall_s == pytest.approx(0.5 + 1.0 + 128 * 0.02)
    assert closed.paused == (CallKey("a2"),)


def test_dfin_decodes_only() -> None:
    """P took 1.95 s of 3.5 s: 80 iterations * 0.02 s no longer fit beside anything else."""
    it = an_open_slot()
    effects = it.stepped(after_s=0.95, iterations=0, prefill_s=0.95, prefill_tokens=800)
    quantum = the(effects, Run).quantum
    assert quantum.max_prefill_tokens == 0
    assert quantum.max_s == pytest.approx(1.6)
    assert it.a_return("r1") == []  # no interrupt either
    effects = it.stepped(after_s=1.6, iterations=80)
    assert the(effects, SlotClosed).phases[-1] == ("Dfin", pytest.approx(1.6))


def test_a_slot_without_session_prefill_can_close_with_its_protected_decode() -> None:
    it = an_open_slot(policy_set("no-sp+slot_close=protected"))
    it.stepped(after_s=0.1, iterations=72)
    closed = the(it.stepped(after_s=0.1, iterations=8), SlotClosed)
    assert closed.closed_because is CloseReason.PROTECTED


def test_a_slot_without_session_prefill_otherwise_decodes_to_its_planned_end() -> None:
    it = an_open_slot(NO_SP)
    assert kinds(it.stepped(after_s=0.1, iterations=80)) == ["Run"]


def test_an_empty_slot_without_session_prefill_closes_at_once() -> None:
    it = an_open_slot(NO_SP)
    closed = the(it.finished("a2"), SlotClosed)
    assert closed.closed_because is CloseReason.EMPTY


def test_an_empty_slot_with_session_prefill_lingers_for_its_sessions() -> None:
    it = an_open_slot()
    effects = it.finished("a2")
    assert the(effects, WakeAt).at_s == pytest.approx(it.now_s + 0.6)
    effects = it.a_return("r1", after_s=0.4)
    assert admitted(effects, "SP") == ["r1"]
    assert kinds(effects) == ["Admit", "Run", "CancelWake"]
    it.prefilled("r1", after_s=0.11, tokens=10)
    it.finished("r1")
    closed = the(it.step(Tick(), after_s=0.6), SlotClosed)
    assert closed.closed_because is CloseReason.EMPTY
    assert closed.idle_s == pytest.approx(0.4 + 0.6)
    assert closed.sp_admitted == 1


def test_a_slot_in_which_nothing_finished_does_not_linger() -> None:
    it = an_open_slot()
    it.step(CallAborted(key=CallKey("a2")))
    closed = the(it.stepped(after_s=0.02, iterations=1, stop="finished"), SlotClosed)
    assert closed.closed_because is CloseReason.EMPTY


def test_lingering_ends_with_the_slots_budget() -> None:
    """0.3 s before the planned end, the 0.6 s of linger are cut to 0.3 s."""
    it = an_open_slot()
    slot = it.scheduler.slot
    assert slot is not None
    effects = it.finished("a2", after_s=slot.end_s - it.now_s - 0.3)
    assert the(effects, WakeAt).at_s == pytest.approx(slot.end_s)


def test_without_work_anywhere_the_model_stays_active() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.switched("a")
    it.prefilled("a1")
    effects = it.finished("a1")
    assert the(effects, SlotClosed).closed_because is CloseReason.IDLE
    assert kinds(effects) == ["SlotClosed"]
    assert kinds(it.queue("b1", "b", after_s=3.0)) == ["RoundPlanned", "Activate"]


def test_a_lone_model_goes_on_with_a_new_slot_and_no_switch() -> None:
    it = Bench(config=msgspec.structs.replace(CONFIG, renew_when_alone=False))
    it.queue("a1", "a")
    it.switched("a")
    it.prefilled("a1")
    assert it.queue("n1", "a") == []
    effects = it.stepped(after_s=7.8, iterations=80)
    assert kinds(effects) == ["SlotClosed", "RoundPlanned", "SlotOpened", "Admit", "Run"]
    assert the(effects, SlotClosed).closed_because is CloseReason.RENEWED
    assert admitted(effects, "P") == ["n1"]


def test_while_no_other_model_waits_a_new_session_need_not_either() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.switched("a")
    it.prefilled("a1")
    assert kinds(it.queue("n1", "a")) == ["Interrupt"]
    effects = it.stepped(after_s=0.02, iterations=1, stop="woken")
    assert the(effects, SlotClosed).closed_because is CloseReason.RENEWED
    assert admitted(effects, "P") == ["n1"]


def test_a_static_ring_switches_through_idle_models() -> None:
    it = Bench(policy_set("no-sp+ring=static"), models=("a", "b", "c"))
    it.queue("a1", "a")
    it.switched("a")
    it.prefilled("a1")
    assert of(it.queue("a2", "a"), Interrupt) == []
    effects = it.finished("a1")
    assert the(effects, Activate).model == "b"
    effects = it.switched("b")
    assert the(effects, SlotClosed).closed_because is CloseReason.EMPTY
    assert the(effects, Activate).model == "c"
    assert the(it.switched("c"), Activate).model == "a"


def test_slots_conserve_time() -> None:
    """0.5 switch + 1.0 P + 0.16 D1 + 0.11 SP + 0.14 D + 0.6 idle = 2.51 s."""
    it = an_open_slot()
    it.a_return("r1")
    it.stepped(after_s=0.16, iterations=8, stop="woken")
    call = CallProgress(key=CallKey("r1"), new_tokens=1, prefilled_tokens=10, finish="stop")
    it.stepped(call, after_s=0.23, prefill_s=0.11, prefill_tokens=10, iterations=6)
    it.finished("a2", after_s=0.02)
    closed = the(it.step(Tick(), after_s=0.6), SlotClosed)
    assert [p for p, _ in closed.phases] == ["P", "D1", "SP", "D", "idle"]
    assert [s for _, s in closed.phases] == pytest.approx([1.0, 0.16, 0.11, 0.14, 0.6])
    assert closed.wall_s == pytest.approx(0.5 + 1.0 + 0.16 + 0.11 + 0.14 + 0.6)
    assert closed.switch_s + closed.active_s + closed.idle_s == pytest.approx(closed.wall_s)


# --- aborts and failures ------------------------------------------------------------------------


def test_a_call_aborted_in_the_queue_is_never_admitted() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.queue("a2", "a")
    it.step(CallAborted(key=CallKey("a1")))
    assert admitted(it.switched("a"), "P") == ["a2"]


def test_a_model_whose_calls_are_all_gone_loses_its_slot() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.step(CallAborted(key=CallKey("a1")))
    effects = it.switched("a")
    assert the(effects, SlotClosed).closed_because is CloseReason.IDLE
    assert of(effects, Run) == []


def test_a_failed_switch_closes_the_slot_and_the_ring_moves_on() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.queue("b1", "b")
    it.step(CallAborted(key=CallKey("a1")))
    effects = it.step(CommandFailed(), after_s=0.3)
    closed = the(effects, SlotClosed)
    assert (closed.closed_because, closed.wall_s) == (CloseReason.FAILED, pytest.approx(0.3))
    assert the(effects, Activate).model == "b"
    assert it.scheduler.active is None


def test_an_engine_that_can_run_nothing_is_asked_again_later_not_at_once() -> None:
    it = Bench()
    it.queue("a1", "a")
    it.switched("a")
    effects = it.stepped(after_s=0.0, stop="idle")
    assert the(effects, WakeAt).at_s == pytest.approx(it.now_s + CONFIG.retry_s)
    assert of(effects, Run) == []
    assert kinds(it.step(Tick(), after_s=CONFIG.retry_s)) == ["Run"]


def test_an_engine_that_can_run_nothing_gives_way_to_other_models() -> None:
    it = an_open_slot()
    closed = the(it.stepped(after_s=0.0, stop="idle"), SlotClosed)
    assert closed.closed_because is CloseReason.STALLED


def test_an_answer_that_nobody_asked_for_is_a_bug() -> None:
    it = Bench()
    with pytest.raises(InvariantBroken):
        it.step(Stepped(report=StepReport(model="a", stop="bound")))


def test_a_key_is_queued_once() -> None:
    it = Bench()
    it.queue("a1", "a")
    with pytest.raises(InvariantBroken):
        it.queue("a1", "a")


# --- what others may know -----------------------------------------------------------------------


def test_predicted_work_is_prefill_and_batched_decode() -> None:
    """Two calls: 2 * (0.1 + 0.1) prefill + 2 * 50 * 0.02 / 2 decode = 1.4 s."""
    it = Bench()
    it.queue("b1", "b")
    it.queue("a1", "a")
    it.queue("a2", "a")
    assert it.scheduler.remaining_s("a") == pytest.approx(1.4)


def test_a_new_call_waits_for_prefills_and_for_decode_only_without_room() -> None:
    """Two calls wait: 2 * (0.1 + 0.1) prefill. In a batch of two, all their work: 1.4 s."""
    roomy, full = Bench(), Bench(config=msgspec.structs.replace(CONFIG, batch_max=2))
    for it in (roomy, full):
        it.queue("b1", "b")
        it.queue("a1", "a")
        it.queue("a2", "a")
    assert roomy.scheduler.queued_s("a") == pytest.approx(0.4)
    assert full.scheduler.queued_s("a") == pytest.approx(1.4)


def test_the_next_slot_is_behind_the_open_one() -> None:
    it = an_open_slot()
    assert it.scheduler.next_slot_s("a", it.now_s) == 0.0
    assert it.scheduler.next_slot_s("b", it.now_s) == pytest.approx(2.5, abs=0.1)
