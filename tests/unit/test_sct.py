"""Partitions of a session's wall time, worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from talaria_admission.sct import SctAccount, Totals
from talaria_common.wire import CallKey, CallParts, CallSettled


def a_call(n: int, arrived_s: float, ended_s: float, **parts: float) -> CallSettled:
    own = {k: v for k, v in parts.items() if k in CallParts.__struct_fields__}
    rest: dict[str, Any] = {k: v for k, v in parts.items() if k not in own}
    return CallSettled(
        key=CallKey(f"c{n}"),
        session="s",
        call_index=n,
        model="m",
        outcome="finished",
        arrived_unix_s=100.0 + arrived_s,
        ended_unix_s=100.0 + ended_s,
        parts=CallParts(**own),
        **rest,
    )


def the_totals(*calls: CallSettled) -> Totals:
    account = SctAccount(min(c.arrived_unix_s for c in calls))
    for call in calls:
        account.add(call)
    totals = account.totals()
    assert sum(msgspec.structs.astuple(totals.parts)) == pytest.approx(totals.sct_s)
    return totals


def test_calls_one_after_the_other_leave_the_time_between_to_tools() -> None:
    totals = the_totals(
        a_call(0, 0, 4, gateway_s=0.5, queue_s=1.5, decode_s=2.0),
        a_call(1, 7, 9, prefill_s=0.5, decode_s=1.5),
    )
    assert totals.sct_s == pytest.approx(9)
    assert totals.parts.tool_gap_s == pytest.approx(3)
    assert totals.parts.queue_s == pytest.approx(1.5)
    assert totals.parts.decode_s == pytest.approx(3.5)
    assert (totals.overlapped_s, totals.parts.unattributed_s) == pytest.approx((0, 0))


def test_what_a_calls_parts_do_not_explain_is_unattributed() -> None:
    totals = the_totals(a_call(0, 0, 4, queue_s=1, decode_s=2))
    assert totals.parts.unattributed_s == pytest.approx(1)


def test_of_two_parallel_calls_the_one_that_ends_last_owns_the_overlap() -> None:
    totals = the_totals(
        a_call(0, 0, 10, queue_s=8, decode_s=2),
        a_call(1, 5, 15, queue_s=4, decode_s=6),
    )
    assert totals.sct_s == pytest.approx(15)
    assert totals.overlapped_s == pytest.approx(5)
    assert totals.parts.queue_s == pytest.approx(5 + 4)  # 5 of the first call's 8
    assert totals.parts.decode_s == pytest.approx(6)  # the first one's decode was overlapped
    assert totals.parts.tool_gap_s == 0


def test_a_call_inside_a_longer_one_is_overlapped_whole() -> None:
    totals = the_totals(a_call(0, 0, 10, decode_s=10), a_call(1, 2, 6, decode_s=4))
    assert totals.overlapped_s == pytest.approx(4)
    assert totals.parts.decode_s == pytest.approx(10)


def test_a_sub_agents_time_is_its_parents_tool_gap() -> None:
    parent = the_totals(a_call(0, 0, 2, decode_s=2), a_call(1, 8, 9, decode_s=1))
    child = the_totals(a_call(2, 2.5, 7.5, decode_s=5))
    assert parent.parts.tool_gap_s == pytest.approx(6)
    assert child.sct_s == pytest.approx(5)


def test_the_order_of_settlement_does_not_matter() -> None:
    calls = [
        a_call(0, 0, 4, decode_s=4),
        a_call(1, 3, 9, queue_s=2, decode_s=4),
        a_call(2, 5, 7, decode_s=2),
        a_call(3, 11, 12, decode_s=1),
    ]
    forward, backward = the_totals(*calls), the_totals(*reversed(calls))
    assert msgspec.structs.astuple(forward.parts) == pytest.approx(
        msgspec.structs.astuple(backward.parts)
    )
    assert forward.overlapped_s == pytest.approx(backward.overlapped_s)
    assert forward.parts.tool_gap_s == pytest.approx(2)


def test_a_long_session_is_partitioned_as_exactly_as_a_short_one() -> None:
    calls = [a_call(n, 3 * n, 3 * n + 2, queue_s=0.5, decode_s=1.5) for n in range(200)]
    totals = the_totals(*calls)
    assert totals.sct_s == pytest.approx(3 * 199 + 2)
    assert totals.parts.tool_gap_s == pytest.approx(199)
    assert totals.parts.decode_s == pytest.approx(300)
    assert totals.overlapped_s == pytest.approx(0)


def test_a_call_that_settles_after_its_time_was_given_away_is_overlapped() -> None:
    calls = [a_call(n, n, n + 0.5, decode_s=0.5) for n in range(100)]
    late = a_call(100, 10, 100, decode_s=90)
    totals = the_totals(*calls, late)
    assert totals.sct_s == pytest.approx(100)
    assert totals.overlapped_s > 0


def test_a_restored_account_goes_on_where_the_backup_ended() -> None:
    first = the_totals(a_call(0, 0, 4, decode_s=4))
    account = SctAccount(100.0 + first.sct_s, first)
    account.add(a_call(1, 6, 7, decode_s=1))
    totals = account.totals()
    assert totals.sct_s == pytest.approx(7)
    assert totals.parts.tool_gap_s == pytest.approx(2)
    assert totals.parts.decode_s == pytest.approx(5)
