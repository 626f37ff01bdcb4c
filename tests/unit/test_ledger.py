"""The parts of a call add up to its wall time, whatever happens to it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from talaria_common.errors import InvariantBroken
from talaria_common.wire import CallParts
from talaria_instance.ledger import INTERVALS_KEPT, Ledger


def total_s(parts: CallParts) -> float:
    return parts.queue_s + parts.switch_s + parts.restore_s + parts.prefill_s + parts.decode_s


def test_a_plain_call_waits_prefills_and_decodes() -> None:
    ledger = Ledger(10.0)
    ledger.running(11.0)
    ledger.first_token(11.5)
    parts = ledger.end(13.5)
    assert parts == CallParts(queue_s=1.0, prefill_s=0.5, decode_s=2.0)
    assert ledger.first_token_s == pytest.approx(1.5)


def test_the_switch_to_its_model_is_no_queueing() -> None:
    ledger = Ledger(0.0)
    ledger.switching(1.0)
    ledger.switched(1.75)
    ledger.running(2.0)
    assert ledger.end(2.5) == CallParts(queue_s=1.25, switch_s=0.75, prefill_s=0.5)


def test_a_restore_is_taken_out_of_the_prefill_that_it_opened() -> None:
    ledger = Ledger(0.0)
    ledger.running(1.0)
    ledger.restored(2.0, 0.25)
    ledger.first_token(2.5)
    parts = ledger.end(3.0)
    assert parts == CallParts(queue_s=1.0, prefill_s=1.25, restore_s=0.25, decode_s=0.5)


def test_a_restore_cannot_have_taken_longer_than_the_call_runs() -> None:
    ledger = Ledger(0.0)
    ledger.running(1.0)
    ledger.restored(1.5, 9.0)
    parts = ledger.end(2.0)
    assert (parts.restore_s, parts.prefill_s) == (0.5, 0.5)


def test_a_paused_call_queues_switches_and_resumes_where_it_was() -> None:
    """Decode 1 s, paused 2 s, switch 0.5 s, decode 1 s."""
    ledger = Ledger(0.0)
    ledger.running(0.0)
    ledger.first_token(0.5)
    ledger.paused(1.5)
    ledger.switching(3.5)
    ledger.switched(4.0)
    ledger.running(4.0)
    parts = ledger.end(5.0)
    assert parts == CallParts(queue_s=2.0, switch_s=0.5, prefill_s=0.5, decode_s=2.0)
    assert [i.part for i in ledger.intervals] == ["prefill", "decode", "queue", "switch", "decode"]


def test_a_call_paused_in_its_prefill_resumes_it() -> None:
    ledger = Ledger(0.0)
    ledger.running(0.0)
    ledger.paused(1.0)
    ledger.running(2.0)
    assert ledger.part == "prefill"
    assert ledger.end(3.0) == CallParts(queue_s=1.0, prefill_s=2.0)


def test_intervals_follow_each_other_without_gaps() -> None:
    ledger = Ledger(0.0)
    for n in range(5):
        ledger.running(n + 0.25)
        ledger.paused(n + 0.75)
    ledger.end(6.0)
    edges = [(i.start_s, i.end_s) for i in ledger.intervals]
    assert edges[0][0] == 0.0
    assert edges[-1][1] == 6.0
    assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_intervals_are_bounded_and_parts_stay_exact() -> None:
    ledger = Ledger(0.0)
    for n in range(500):
        ledger.running(float(2 * n + 1))
        ledger.paused(float(2 * n + 2))
    parts = ledger.end(1001.0)
    assert len(ledger.intervals) == INTERVALS_KEPT
    assert (parts.queue_s, parts.prefill_s) == (501.0, 500.0)


def test_a_switch_to_another_slot_does_not_touch_a_running_call() -> None:
    ledger = Ledger(0.0)
    ledger.running(0.0)
    ledger.switching(1.0)
    assert ledger.part == "prefill"


def test_the_parts_always_add_up() -> None:
    ledger = Ledger(0.1)
    ledger.switching(0.3)
    ledger.switched(0.7)
    ledger.running(1.1)
    ledger.restored(1.3, 0.1)
    ledger.first_token(1.7)
    ledger.paused(1.9)
    ledger.running(2.3)
    assert total_s(ledger.end(3.1)) == pytest.approx(3.0, abs=1e-12)


def test_time_does_not_go_back() -> None:
    ledger = Ledger(1.0)
    with pytest.raises(InvariantBroken):
        ledger.running(0.5)


def test_nothing_happens_to_a_call_that_is_over() -> None:
    ledger = Ledger(0.0)
    ledger.end(1.0)
    with pytest.raises(InvariantBroken):
        ledger.running(2.0)
