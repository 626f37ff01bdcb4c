"""How long a round and its slots are, and how much decode each slot protects (A4). Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from talaria_common.perf import ModelTiming

Positive = Annotated[float, Meta(gt=0)]
PositiveCount = Annotated[int, Meta(ge=1)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of rounds and slots."""

    t_ttft_s: Positive = 10.0
    """Time to first token that rounds are planned for."""
    gamma: Annotated[float, Meta(gt=0, lt=1)] = 0.85
    """Share of `t_ttft_s` that one round may take (equation 5)."""
    t_tpot_s: Positive = 0.1
    """Time per output token that decode is protected for."""
    slot_min_s: Positive = 0.5
    """Shortest slot, so that each does something useful however many models have work."""
    sp_check_every: PositiveCount = 8
    """Decode iterations in one run, between two looks at who has returned."""
    batch_max: PositiveCount = 32
    """Sequences of one model that the engine holds at a time."""
    prefill_tokens_max: PositiveCount = 8192
    """Prompt tokens computed in one run."""
    sp_prefill_tokens_max: PositiveCount = 8192
    """Prompt tokens that one session-prefill may add."""
    retry_s: Positive = 0.05
    """Wait before the engine is asked again when it could run none of a lone model's calls."""
    renew_when_alone: bool = True
    """While no other model has work, what waits opens a new slot at the next decode boundary
    instead of at the plan's end: nobody gains from the wait."""

    @property
    def round_s(self) -> float:
        """Longest round that equation 5 allows."""
        return self.gamma * self.t_ttft_s


class SlotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Budget of one slot."""

    budget_s: float
    reserved_iterations: int
    """Decode iterations that no prefill may displace."""
    unmet_iterations: int
    """Iterations of d_m that half of the slot cannot carry."""
    protected_s: float
    """Seconds of the budget that the reserved iterations take."""


def ring_order(models: Sequence[str], after: str | None) -> list[str]:
    """The ring, starting with the model behind `after`."""
    start = models.index(after) + 1 if after in models else 0
    return [*models[start:], *models[:start]]


def slot_s(
    config: SchedulerConfig,
    models: Collection[str],
    active: str | None,
    timings: Mapping[str, ModelTiming],
) -> float:
    """Length of each slot: what a round's switches leave, shared equally, with a floor.

    A round over one model that is active already has no switch.
    """
    switches_s = sum(timings[m].switch_s for m in models if len(models) > 1 or m != active)
    return max(config.slot_min_s, (config.round_s - switches_s) / max(len(models), 1))


def plan_slot(config: SchedulerConfig, timing: ModelTiming, budget_s: float) -> SlotPlan:
    """Reserve decode for one slot of `budget_s` (equation 4).

    In one round of R seconds a sequence decodes d iterations of tD seconds and stands still for
    U = R - d * tD. It keeps its pace if the slack that the iterations earn covers that:

        d * (T_TPOT - tD) >= R - d * tD   <=>   d * T_TPOT >= R   <=>   d >= R / T_TPOT

    so d_m = ceil(R / T_TPOT), whatever tD is; but an iteration earns slack only if tD < T_TPOT,
    else equation 4 has no solution. Protected decode takes at most half of a slot. What of d_m
    does not fit there is unmet: a deadline risk, counted and not rolled over.
    """
    wanted = math.ceil(config.round_s / config.t_tpot_s)
    step_s = max(timing.decode_step_s, 1e-6)
    reserved = min(wanted, max(1, math.floor(budget_s / 2 / step_s)))
    is_feasible = step_s < config.t_tpot_s
    return SlotPlan(
        budget_s=budget_s,
        reserved_iterations=reserved,
        unmet_iterations=wanted - reserved if is_feasible else max(1, wanted - reserved),
        protected_s=min(reserved * step_s, budget_s / 2),
    )
