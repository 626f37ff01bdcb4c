"""The performance model: what calls and switches take on one instance, learned as they run. Pure.

Five terms a model, all in seconds, each an exponentially weighted mean of what was measured.
Predictions are linear in tokens. The scheduler plans with them; snapshots carry the terms, and the
router's costs, which admission charges, are made from those.
"""

from __future__ import annotations

from typing import Final

import msgspec

STEP_WEIGHT: Final = 0.2
"""Weight of a new step: five or so steps carry a change of batch or context."""
SWITCH_WEIGHT: Final = 0.3
"""Weight of a new switch: they are rare, and the last few tell most about the next."""
FIXED_FLOOR_S: Final = 1e-5
TOKEN_FLOOR_S: Final = 1e-8
"""Scales below which a term still takes its share of an error, so that none is stuck at zero."""


class ModelTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted times of one model on one instance."""

    model: str
    prefill_fixed_s: float = 0.05
    """Floor of one call's prefill."""
    prefill_token_s: float = 0.001
    decode_step_s: float = 0.02
    """One decode iteration of the usual batch."""
    restore_token_s: float = 0.00001
    switch_s: float = 0.5
    """Making the model active when another one is."""

    def prefill_s(self, tokens: int) -> float:
        """Computing `tokens` prompt tokens of one call; 0 for none."""
        return self.prefill_fixed_s + tokens * self.prefill_token_s if tokens > 0 else 0.0

    def restore_s(self, tokens: int) -> float:
        """Bringing `tokens` from the host to the device."""
        return tokens * self.restore_token_s

    def decode_s(self, tokens: int, batch: int = 1) -> float:
        """A call's own share of `tokens` decode iterations in a batch of `batch`."""
        return tokens * self.decode_step_s / max(batch, 1)


class TimingModel:
    """Learns a `ModelTiming` from what ran; the first measurement of a term replaces its seed."""

    def __init__(self, seed: ModelTiming) -> None:
        self._timing = seed
        self._measured: set[str] = set()

    @property
    def timing(self) -> ModelTiming:
        """The current means."""
        return self._timing

    def observe_prefill(self, seconds: float, *, tokens: int, calls: int) -> None:
        """`calls` prefills of `tokens` tokens in all took `seconds`.

        One equation, two unknowns: the error of the prediction is shared out between the fixed
        and the per-token term by the squares of their parts (normalised least mean squares), so
        long prefills teach the slope and short ones the floor. Neither goes below zero.
        """
        if tokens <= 0 or calls <= 0 or seconds < 0:
            return
        old = self._timing
        fixed_part_s = calls * old.prefill_fixed_s
        token_part_s = tokens * old.prefill_token_s
        fixed_scale = max(fixed_part_s, calls * FIXED_FLOOR_S) ** 2
        fixed_share = fixed_scale / (fixed_scale + max(token_part_s, tokens * TOKEN_FLOOR_S) ** 2)
        error_s = self._weight("prefill", STEP_WEIGHT) * (seconds - fixed_part_s - token_part_s)
        fixed_s = max(0.0, fixed_part_s + error_s * fixed_share)
        token_s = max(0.0, token_part_s + error_s * (1.0 - fixed_share))
        self._replace(prefill_fixed_s=fixed_s / calls, prefill_token_s=token_s / tokens)

    def observe_decode(self, seconds: float, *, iterations: int) -> None:
        """`iterations` decode iterations took `seconds`."""
        if iterations > 0 and seconds >= 0:
            weight = self._weight("decode", STEP_WEIGHT)
            mean_s = _mean(self._timing.decode_step_s, seconds / iterations, weight)
            self._replace(decode_step_s=mean_s)

    def observe_restore(self, seconds: float, *, tokens: int) -> None:
        """`tokens` came back from the host in `seconds`."""
        if tokens > 0 and seconds >= 0:
            weight = self._weight("restore", STEP_WEIGHT)
            mean_s = _mean(self._timing.restore_token_s, seconds / tokens, weight)
            self._replace(restore_token_s=mean_s)

    def observe_switch(self, seconds: float) -> None:
        """The model was made active in `seconds`."""
        if seconds >= 0:
            weight = self._weight("switch", SWITCH_WEIGHT)
            self._replace(switch_s=_mean(self._timing.switch_s, seconds, weight))

    def _weight(self, term: str, weight: float) -> float:
        if term in self._measured:
            return weight
        self._measured.add(term)
        return 1.0

    def _replace(self, **terms: float) -> None:
        self._timing = msgspec.structs.replace(self._timing, **terms)


def _mean(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
