"""A session's wall time is partitioned whatever its calls do: parts add up, nothing is counted twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria_admission.sct import PENDING_MAX, SctAccount
from talaria_common.wire import CallKey, CallParts, CallSettled

START_S = 1000.0
times = st.integers(0, 40).map(lambda n: n / 4)
intervals = st.tuples(times, times, st.floats(0, 1), st.floats(0, 1))


def calls_of(drawn: list[tuple[float, float, float, float]]) -> list[CallSettled]:
    out = []
    for n, (arrived_s, length_s, queue_share, told_share) in enumerate(drawn):
        told_s = length_s * told_share
        out.append(
            CallSettled(
                key=CallKey(f"c{n}"),
                session="s",
                call_index=n,
                model="m",
                outcome="finished",
                arrived_unix_s=START_S + arrived_s,
                ended_unix_s=START_S + arrived_s + length_s,
                parts=CallParts(queue_s=told_s * queue_share, decode_s=told_s * (1 - queue_share)),
            )
        )
    return out


def covered_s(calls: list[CallSettled]) -> float:
    """Length of the union of the calls' intervals, instant by instant (times are quarters)."""
    return sum(
        0.25
        for n in range(100)
        if any(c.arrived_unix_s - START_S <= n / 4 < c.ended_unix_s - START_S for c in calls)
    )


@given(st.lists(intervals, min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_parts_gaps_and_the_unattributed_add_up_to_the_wall_time(
    drawn: list[tuple[float, float, float, float]],
) -> None:
    calls = calls_of(drawn)
    account = SctAccount(START_S)
    for call in calls:
        account.add(call)
    totals = account.totals()
    wall_s = max(c.ended_unix_s for c in calls) - START_S
    busy_s = covered_s(calls)
    in_calls_s = sum(c.ended_unix_s - c.arrived_unix_s for c in calls)
    assert totals.sct_s == pytest.approx(wall_s)
    assert sum(msgspec.structs.astuple(totals.parts)) == pytest.approx(wall_s)
    assert totals.parts.tool_gap_s == pytest.approx(wall_s - busy_s)
    assert totals.overlapped_s == pytest.approx(in_calls_s - busy_s)
    assert totals.parts.unattributed_s >= -1e-9


@given(st.lists(intervals, min_size=2, max_size=10), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_settlement_does_not_matter(
    drawn: list[tuple[float, float, float, float]], random: object
) -> None:
    calls = calls_of(drawn)
    shuffled = list(calls)
    random.shuffle(shuffled)
    first, second = SctAccount(START_S), SctAccount(START_S)
    for call in calls:
        first.add(call)
    for call in shuffled:
        second.add(call)
    left, right = first.totals(), second.totals()
    assert left.sct_s == pytest.approx(right.sct_s)
    assert left.overlapped_s == pytest.approx(right.overlapped_s)


@given(st.lists(intervals, min_size=PENDING_MAX + 1, max_size=PENDING_MAX + 60))
@settings(max_examples=25, deadline=None)
def test_a_long_session_still_adds_up(drawn: list[tuple[float, float, float, float]]) -> None:
    account = SctAccount(START_S)
    for call in calls_of(drawn):
        account.add(call)
    totals = account.totals()
    assert sum(msgspec.structs.astuple(totals.parts)) == pytest.approx(totals.sct_s)
    assert totals.parts.tool_gap_s >= 0
    assert totals.overlapped_s >= 0
