"""What an engine knows of its models, as the scheduler hears it. Pure."""

from __future__ import annotations

from typing import Final

from talaria_common.perf import ModelTiming
from talaria_instance.engine.protocol import EngineFacts
from talaria_instance.events import TimingChanged

SWITCH_SEED_S: Final = 0.5
"""Switch time of a lone model, which is active from the start and so does not tell."""


def timings_of(facts: EngineFacts) -> list[TimingChanged]:
    """First timings of all models; the active one switches like the mean of the others."""
    known_s = [m.switch_s for m in facts.models if m.switch_s > 0]
    seed_s = sum(known_s) / len(known_s) if known_s else SWITCH_SEED_S
    return [
        TimingChanged(
            timing=ModelTiming(
                model=m.model,
                prefill_fixed_s=m.prefill_fixed_s,
                prefill_token_s=m.prefill_token_s,
                decode_step_s=m.decode_step_s,
                restore_token_s=m.restore_token_s,
                switch_s=m.switch_s or seed_s,
            ),
            blocks_max=m.blocks_max,
            is_active=m.model == facts.active,
        )
        for m in facts.models
    ]
