"""When a slot closes, and why (A3, A4, B5 with a fixed linger). Pure."""

from __future__ import annotations

from typing import Final

from talaria_common.policies import PolicySet
from talaria_instance.events import CloseReason
from talaria_instance.state import ModelQueue, Slot

TIME_GRAIN_S: Final = 0.001
"""A budget below this is spent: no iteration of any engine fits in it."""


class CloseRules:
    """The rules of one policy set; asked at decode boundaries only."""

    def __init__(self, policy: PolicySet) -> None:
        self._expects_returns = policy.session_prefill
        self._linger_s = policy.linger_s
        self.closes_when_protected = policy.slot_close == "protected" and not policy.session_prefill
        """The slot ends with its reserved iterations instead of its planned end."""

    def when_due(self, slot: Slot, queue: ModelQueue, now_s: float) -> CloseReason | None:
        """Why a slot with calls in the engine closes while another model waits; None: it goes on."""
        if slot.is_final:
            is_over = slot.final_end_s - now_s < TIME_GRAIN_S or slot.is_stalled
            return CloseReason.BUDGET if is_over or not slot.protected_left else None
        if slot.is_stalled:
            return CloseReason.STALLED
        if self.closes_when_protected and not slot.protected_left:
            return CloseReason.PROTECTED
        if slot.free_s(now_s) >= TIME_GRAIN_S:
            return None
        can_decode = any(r.prefill_left == 0 for r in queue.running.values())
        return None if slot.protected_left and can_decode else CloseReason.BUDGET

    def when_alone(self, slot: Slot, now_s: float) -> CloseReason | None:
        """Why a slot with calls in the engine is renewed while no other model waits."""
        is_spent = self.closes_when_protected and not slot.protected_left
        is_over = slot.is_final or is_spent or slot.free_s(now_s) < TIME_GRAIN_S
        return CloseReason.RENEWED if is_over else None

    def when_empty(
        self, slot: Slot, now_s: float, *, has_work: bool, is_due: bool
    ) -> CloseReason | None:
        """Why a slot without calls in the engine closes; None: it lingers for returns.

        `has_work`: some model has; `is_due`: another one waits for its slot.
        """
        if not has_work:
            return CloseReason.IDLE
        if not is_due:
            return CloseReason.RENEWED
        is_expecting = self._expects_returns and slot.finished > 0
        return None if is_expecting and now_s < self.linger_end_s(slot) else CloseReason.EMPTY

    def linger_end_s(self, slot: Slot) -> float:
        """Until when an empty slot waits for the sessions whose calls finished in it."""
        since_s = slot.opened_s if slot.linger_since_s is None else slot.linger_since_s
        return min(since_s + self._linger_s, slot.end_s)
