"""What the scheduler is told and what it decides, as values that can be recorded. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, TypeAlias

import msgspec

from talaria_common.perf import ModelTiming
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import Quantum, StepReport, SwitchRecord

Phase: TypeAlias = Literal["P", "D1", "SP", "D", "Dfin", "idle"]
"""Phases of an open slot; `idle`: nothing to run, waiting for returns."""


class ParkReason(StrEnum):
    """The budget that kept an eligible continuation out of a session-prefill."""

    TIME = "time"
    BLOCKS = "blocks"
    BATCH = "batch"
    PREFILL_TOKENS = "prefill_tokens"


class CloseReason(StrEnum):
    """Why a slot closed."""

    BUDGET = "budget"
    """Its time is over."""
    PROTECTED = "protected"
    """Its reserved decode iterations are spent (slot_close = protected)."""
    EMPTY = "empty"
    """Nothing can run here and other models have work."""
    STALLED = "stalled"
    """The engine could run none of its calls and other models have work."""
    RENEWED = "renewed"
    """No other model has work: a new slot of the same model follows without a switch."""
    IDLE = "idle"
    """No model has work."""
    FAILED = "failed"
    """The engine failed to switch or to run."""


# --- events -------------------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    pass


class CallQueued(_Event, frozen=True, kw_only=True, tag="call_queued"):
    """An accepted call waits for its model."""

    key: CallKey
    model: str
    prompt_tokens: int
    device_tokens: int = 0
    host_tokens: int = 0
    """Further prompt tokens, restorable from the host."""
    output_tokens: int = 0
    """Expected output."""
    blocks: int = 0
    """KV blocks of prompt and output together."""
    is_continuation: bool = False


class CallAborted(_Event, frozen=True, kw_only=True, tag="call_aborted"):
    """The call is over for the scheduler, whatever its state; unknown keys are ignored."""

    key: CallKey


class Stepped(_Event, frozen=True, kw_only=True, tag="stepped"):
    """The outstanding `Run` has returned."""

    report: StepReport


class Switched(_Event, frozen=True, kw_only=True, tag="switched"):
    """The outstanding `Activate` is done."""

    record: SwitchRecord


class CommandFailed(_Event, frozen=True, kw_only=True, tag="command_failed"):
    """The outstanding `Activate` or `Run` raised; the calls it concerned are aborted already."""


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """The time asked for by `WakeAt` has come."""


class TimingChanged(_Event, frozen=True, kw_only=True, tag="timing_changed"):
    """Facts of a model from outside: at the start, and whenever the engine knows better."""

    timing: ModelTiming
    blocks_max: int
    """Blocks of the largest pool that the model can have."""
    is_active: bool = False


Event: TypeAlias = (
    CallQueued | CallAborted | Stepped | Switched | CommandFailed | Tick | TimingChanged
)


# --- effects ------------------------------------------------------------------------------------


class _Effect(msgspec.Struct, frozen=True, kw_only=True, tag_field="effect"):
    pass


class Activate(_Effect, frozen=True, kw_only=True, tag="activate"):
    """Switch the engine to a model; answered by `Switched`."""

    model: str


class Admit(_Effect, frozen=True, kw_only=True, tag="admit"):
    """Hand calls to the engine for its next run, in this order."""

    keys: tuple[CallKey, ...]
    phase: Literal["P", "SP"]


class Run(_Effect, frozen=True, kw_only=True, tag="run"):
    """Run the active model within bounds; answered by `Stepped`."""

    quantum: Quantum


class Interrupt(_Effect, frozen=True, kw_only=True, tag="interrupt"):
    """Ask the outstanding `Run` to return at its next decode boundary."""


class WakeAt(_Effect, frozen=True, kw_only=True, tag="wake_at"):
    """Send a `Tick` at this time; replaces an earlier one."""

    at_s: float


class CancelWake(_Effect, frozen=True, kw_only=True, tag="cancel_wake"):
    """No `Tick` is wanted any more."""


class Parked(_Effect, frozen=True, kw_only=True, tag="parked"):
    """An eligible continuation did not fit a session-prefill; once per call and slot."""

    key: CallKey
    because: ParkReason


class RoundPlanned(_Effect, frozen=True, kw_only=True, tag="round_planned"):
    """A new round."""

    round_n: int
    models: tuple[str, ...]
    """In the order of their slots."""
    round_s: float
    slot_s: float


class SlotOpened(_Effect, frozen=True, kw_only=True, tag="slot_opened"):
    """A model is active and its slot begins."""

    n: int
    round_n: int
    model: str
    budget_s: float
    reserved_iterations: int
    """Decode iterations that are protected (d_m)."""
    unmet_iterations: int
    """Part of d_m that half of the slot cannot carry: deadline risk."""
    resumed: tuple[CallKey, ...] = ()


class SlotClosed(_Effect, frozen=True, kw_only=True, tag="slot_closed"):
    """A slot is over; switch and phases add up to its wall time."""

    n: int
    round_n: int
    model: str
    wall_s: float
    """From the start of its switch, or its opening if there was none."""
    switch_s: float
    phases: tuple[tuple[Phase, float], ...]
    """Phase and seconds, in order."""
    prefilled: int
    """Calls that P admitted."""
    sp_admitted: int
    sp_parked: int
    tokens: int
    iterations: int
    paused: tuple[CallKey, ...]
    closed_because: CloseReason
    switch_path: str = ""
    switch_bytes: int = 0

    @property
    def idle_s(self) -> float:
        """Open without runnable work."""
        return sum(seconds for phase, seconds in self.phases if phase == "idle")

    @property
    def active_s(self) -> float:
        """Open with runnable work."""
        return sum(seconds for phase, seconds in self.phases if phase != "idle")


Effect: TypeAlias = (
    Activate
    | Admit
    | Run
    | Interrupt
    | WakeAt
    | CancelWake
    | Parked
    | RoundPlanned
    | SlotOpened
    | SlotClosed
)


# --- recordings ---------------------------------------------------------------------------------


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a scheduler recording (docs/formats.md)."""

    now_s: float
    event: Event
    effects: list[Effect]


RECORDED: Final = msgspec.json.Decoder(RecordedStep)
