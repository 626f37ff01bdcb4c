"""The performance model learns each term from the runs that tell about it."""

from __future__ import annotations

import pytest

from talaria_common.perf import ModelTiming, TimingModel

SEED = ModelTiming(
    model="m",
    prefill_fixed_s=0.1,
    prefill_token_s=0.001,
    decode_step_s=0.02,
    restore_token_s=0.0001,
    switch_s=1.0,
)


def test_predictions_are_linear_in_tokens_and_decode_is_shared_by_the_batch() -> None:
    """200 * 0.0001, 0.1 + 300 * 0.001, 50 * 0.02 / 4."""
    assert SEED.restore_s(200) == pytest.approx(0.02)
    assert SEED.prefill_s(300) == pytest.approx(0.4)
    assert SEED.decode_s(50, batch=4) == pytest.approx(0.25)


def test_nothing_to_prefill_takes_no_time() -> None:
    assert SEED.prefill_s(0) == 0.0


def test_the_first_measurement_replaces_the_seed_and_later_ones_are_averaged() -> None:
    """First 8 steps in 0.4 s: 0.05. Then 0.1 a step: 0.05 + 0.2 * 0.05 = 0.06."""
    model = TimingModel(SEED)
    model.observe_decode(0.4, iterations=8)
    assert model.timing.decode_step_s == pytest.approx(0.05)
    model.observe_decode(0.4, iterations=4)
    assert model.timing.decode_step_s == pytest.approx(0.06)


def test_restore_and_switch_are_learned_apart() -> None:
    model = TimingModel(SEED)
    model.observe_restore(0.5, tokens=1000)
    model.observe_switch(2.0)
    model.observe_switch(3.0)
    assert model.timing.restore_token_s == pytest.approx(0.0005)
    assert model.timing.switch_s == pytest.approx(2.3)
    assert model.timing.decode_step_s == SEED.decode_step_s


def test_long_and_short_prefills_teach_slope_and_floor() -> None:
    """The truth is 0.05 s + 0.004 s/token; both terms are found from mixed lengths."""
    model = TimingModel(SEED)
    for n in range(200):
        tokens, calls = (2000, 1) if n % 2 else (5, 2)
        model.observe_prefill(calls * 0.05 + tokens * 0.004, tokens=tokens, calls=calls)
    assert model.timing.prefill_token_s == pytest.approx(0.004, rel=0.05)
    assert model.timing.prefill_fixed_s == pytest.approx(0.05, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, 1e-6])
def test_terms_never_go_below_zero(seconds: float) -> None:
    model = TimingModel(SEED)
    for _ in range(20):
        model.observe_prefill(seconds, tokens=500, calls=3)
    assert model.timing.prefill_fixed_s >= 0
    assert model.timing.prefill_token_s >= 0


def test_a_measurement_of_nothing_changes_nothing() -> None:
    model = TimingModel(SEED)
    model.observe_prefill(0.3, tokens=0, calls=0)
    model.observe_decode(0.3, iterations=0)
    model.observe_restore(0.3, tokens=0)
    assert model.timing == SEED
