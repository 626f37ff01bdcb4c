"""How long a replay will take, from measured speeds, and cutting it to a budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from talaria_sim.workload import Workload


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One model's, for a single call."""

    prefill_token_s: float
    decode_step_s: float


def estimate_s(
    workload: Workload, models: Mapping[str, str], speeds: Mapping[str, Speed], reused: float
) -> float:
    """Predicted seconds of engine work when calls run one after the other.

    What batches save about pays for the switches: on two cores the demonstration took 0.7 to 1.2
    times as long as this says for a policy that reuses nothing.
    `reused`: share of the earlier prompt that a continuation does not compute again.
    """
    total_s = 0.0
    for session in workload.sessions:
        speed = speeds[models[session.label]]
        for n, call in enumerate(session.calls):
            known = session.calls[n - 1].prompt_tokens * reused if session.extends(n) else 0.0
            total_s += max(0.0, call.prompt_tokens - known) * speed.prefill_token_s
            total_s += call.output_tokens * speed.decode_step_s
    return total_s


def fitted(
    workload: Workload, models: Mapping[str, str], speeds: Mapping[str, Speed], budget_s: float
) -> Workload:
    """The workload with as many calls a session, at least two, as fit `budget_s` with nothing reused."""
    most = max((len(session.calls) for session in workload.sessions), default=0)
    for calls in range(most, 2, -1):
        cut = workload.limited(calls=calls)
        if estimate_s(cut, models, speeds, reused=0.0) <= budget_s:
            return cut
    return workload.limited(calls=2)
