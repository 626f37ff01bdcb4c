"""Choice of the next token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from talaria_instance.engine.torch.sampler import Bits, Row, TokenSampler
from talaria_instance.engine.torch.text import Sampling

EOS = 3
VOCAB = 40


def a_sampler(**settings: Any) -> TokenSampler:
    return TokenSampler(Sampling(**{"max_tokens": 10, "seed": 1} | settings), [EOS])


def a_row(*likely: int) -> Row:
    """Logits in which the given tokens are the likeliest, in falling order."""
    row = np.full(VOCAB, -5.0, dtype=np.float32)
    for rank, token in enumerate(likely):
        row[token] = 2.0 - rank
    return row


def allow(*tokens: int) -> Bits:
    bits = np.zeros(VOCAB // 32 + 1, dtype=np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits


def draws(sampler: TokenSampler, row: Row, count: int = 400) -> Counter[int]:
    return Counter(sampler.pick(row, None, 5) for _ in range(count))


def test_temperature_0_takes_the_likeliest() -> None:
    assert a_sampler(temperature=0.0).pick(a_row(7, 8), None, 0) == 7


def test_only_allowed_tokens_are_taken() -> None:
    row = a_row(7, 8, 35)
    assert a_sampler(temperature=0.0).pick(row, allow(35, 8), 0) == 8
    hot = a_sampler(temperature=50.0)
    assert {hot.pick(row, allow(35, 8), 0) for _ in range(50)} == {35, 8}


def test_tokens_beyond_a_short_mask_are_not_allowed() -> None:
    assert a_sampler(temperature=0.0).pick(a_row(35, 8), allow(8)[:1], 0) == 8


def test_the_end_waits_for_min_tokens() -> None:
    sampler = a_sampler(temperature=0.0, min_tokens=2)
    row = a_row(EOS, 8)
    assert [sampler.pick(row, None, n) for n in range(3)] == [8, 8, EOS]
    assert [sampler.is_plain(n) for n in range(3)] == [False, False, True]


def test_a_grammar_that_allows_only_the_end_wins_over_min_tokens() -> None:
    sampler = a_sampler(temperature=0.0, min_tokens=2)
    assert sampler.pick(a_row(8), allow(EOS), 0) == EOS


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(a_sampler(temperature=5.0, top_k=2), a_row(7, 8, 9))) == {7, 8}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # Shares of 7, 8, 9 are about 0.64, 0.24, 0.09.
    row = a_row(7, 8, 9)
    assert set(draws(a_sampler(top_p=0.5), row)) == {7}
    assert set(draws(a_sampler(top_p=0.8), row)) == {7, 8}


def test_top_p_looks_beyond_its_first_guess() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    seen = {a_sampler(top_p=0.9, seed=n).pick(flat, None, 0) for n in range(200)}
    assert max(seen) > 1000


def test_shares_follow_the_softmax() -> None:
    counts = draws(a_sampler(), a_row(7, 8), 4000)
    assert counts[7] / counts[8] == pytest.approx(np.e, rel=0.15)


def test_a_lower_temperature_sharpens() -> None:
    cold = draws(a_sampler(temperature=0.3), a_row(7, 8))
    assert cold[7] > 350


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    flat = np.zeros(VOCAB, dtype=np.float32)
    first, again, other = (
        [sampler.pick(flat, None, 0) for _ in range(20)]
        for sampler in (a_sampler(seed=-5), a_sampler(seed=-5), a_sampler(seed=6))
    )
    assert first == again != other


def test_the_logits_are_left_alone() -> None:
    row = a_row(7, 8)
    before = row.copy()
    a_sampler(min_tokens=9).pick(row, allow(7, EOS), 0)
    assert (row == before).all()
