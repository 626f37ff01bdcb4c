"""Figures of a replay from its records."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_common.wire import SlotReport
from talaria_sim.metrics.summary import (
    baseline,
    caveats,
    headline,
    percentile,
    speedup,
    summarise,
    tpot_s,
    ttft_s,
)
from talaria_sim.records import CallRecord, RunRecord, SessionRecord

ISSUE_KEYS = {
    "sct_p50_s",
    "sct_p95_s",
    "sct_p99_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "tpot_p50_s",
    "calls_finished",
    "cached_share",
    "rounds",
    "switches",
    "switch_share",
    "sp_admitted",
    "sp_parked",
    "shed",
    "cut_by_context",
    "unattributed_share",
    "wall_s",
}


def a_call(index: int = 0, at_s: float = 0.0, **changes: Any) -> CallRecord:
    fields: dict[str, Any] = {
        "index": index,
        "intended_s": at_s,
        "first_token_s": at_s + 1.0,
        "ended_s": at_s + 3.0,
        "outcome": "finished",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "output_tokens": 5,
    }
    return CallRecord(**(fields | changes))


def a_session(*calls: CallRecord, **changes: Any) -> SessionRecord:
    fields: dict[str, Any] = {
        "id": "s1",
        "label": "m0",
        "model": "tiny-a",
        "planned_calls": len(calls),
        "calls": calls,
    }
    return SessionRecord(**(fields | changes))


def a_run(*sessions: SessionRecord, slots: tuple[SlotReport, ...] = ()) -> RunRecord:
    return RunRecord(sessions=sessions, slots=slots, started_unix_s=1000.0, wall_s=9.0)


def a_slot(n: int, round_n: int, switch_s: float, active_s: float, **changes: Any) -> SlotReport:
    fields: dict[str, Any] = {
        "instance": "i-1",
        "model": "tiny-a",
        "n": n,
        "round_n": round_n,
        "opened_unix_s": 1000.0 + n,
        "switch_s": switch_s,
        "active_s": active_s,
        "idle_s": 0.0,
    }
    return SlotReport(**(fields | changes))


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.01, 7.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.51, 3.0),
        ([float(n) for n in range(1, 101)], 0.95, 95.0),
        ([float(n) for n in range(1, 101)], 1.0, 100.0),
    ],
)
def test_a_percentile_is_the_nearest_rank(
    values: list[float], q: float, expected: float | None
) -> None:
    assert percentile(values, q) == expected


def test_sct_runs_from_the_first_arrival_to_the_last_token_gaps_included() -> None:
    session = a_session(a_call(0, 0.5), a_call(1, 10.0))
    assert session.sct_s == pytest.approx(12.5)


def test_a_session_with_a_failed_call_has_no_sct() -> None:
    failed = a_call(1, 10.0, outcome="failed", first_token_s=None)
    assert a_session(a_call(0), failed).sct_s is None


def test_a_session_cut_by_its_context_counts_to_its_last_answer() -> None:
    cut = a_call(1, 10.0, outcome="cut_by_context", first_token_s=None)
    run = a_run(a_session(a_call(0), cut, planned_calls=9))
    entry = summarise(run)
    assert entry["cut_by_context"] == 1
    assert entry["sct_p50_s"] == 3.0
    assert entry["calls_finished"] == 1
    assert entry["calls_planned"] == 9


def test_ttft_counts_from_the_intended_arrival() -> None:
    assert ttft_s(a_call(0, 5.0, first_token_s=9.0)) == pytest.approx(4.0)


def test_tpot_is_the_mean_over_the_tokens_after_the_first() -> None:
    assert tpot_s(a_call(output_tokens=5)) == pytest.approx(0.5)
    assert tpot_s(a_call(output_tokens=1)) is None


def test_the_entry_has_every_key_that_readers_rely_on() -> None:
    assert summarise(a_run(a_session(a_call()))).keys() >= ISSUE_KEYS


def test_slots_give_rounds_switches_and_their_share() -> None:
    slots = (
        a_slot(1, 1, 0.0, 3.0, sp_admitted=2, sp_parked=1),
        a_slot(2, 1, 1.0, 2.0, sp_admitted=1),
        a_slot(3, 2, 1.0, 3.0),
        a_slot(1, 1, 0.0, 0.0, instance="i-2"),
    )
    entry = summarise(a_run(a_session(a_call()), slots=slots))
    assert entry["rounds"] == 3
    assert entry["switches"] == 2
    assert entry["switch_share"] == 0.2
    assert (entry["sp_admitted"], entry["sp_parked"]) == (3, 1)
    assert entry["slots"][1]["opened_s"] == 2.0


def test_shares_are_over_all_finished_calls() -> None:
    run = a_run(
        a_session(a_call(prompt_tokens=100, cached_tokens=0)),
        a_session(a_call(prompt_tokens=300, cached_tokens=200)),
    )
    assert summarise(run)["cached_share"] == 0.5


def test_unattributed_time_is_a_share_of_the_stacks_own_sct() -> None:
    document = {"sct_s": 4.0, "parts": {"decode_s": 3.9, "unattributed_s": 0.1}}
    entry = summarise(a_run(a_session(a_call(), document=document)))
    assert entry["unattributed_share"] == 0.025
    assert entry["parts_s"]["decode_s"] == 3.9


def test_a_call_that_was_refused_several_times_is_shed_once() -> None:
    assert summarise(a_run(a_session(a_call(times_shed=3))))["shed"] == 1


def test_an_empty_run_has_no_percentiles_and_no_division() -> None:
    entry = summarise(a_run())
    assert entry["sct_p50_s"] is None
    assert entry["cached_share"] == 0.0


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["talaria"], None),
        (["talaria", "no-sp"], "no-sp"),
        (["talaria", "round-only", "no-sp"], "round-only"),
        (
            ["talaria", "round-only+slot_close=protected", "no-sp"],
            "round-only+slot_close=protected",
        ),
        (["round-only", "talaria"], "talaria"),
    ],
)
def test_the_baseline_is_round_only_else_the_last(names: list[str], expected: str | None) -> None:
    assert baseline(names) == expected


def a_document(ours_s: float | None, theirs_s: float | None) -> dict[str, Any]:
    entry = {"calls_failed": 0, "shed": 0, "cut_by_context": 0}
    return {
        "policies": {
            "talaria": entry | {"sct_p50_s": ours_s},
            "round-only": entry | {"sct_p50_s": theirs_s},
        }
    }


@pytest.mark.parametrize(
    ("ours_s", "theirs_s", "words"),
    [
        (10.0, 21.0, "2.1x sooner than round-only"),
        (21.0, 10.0, "2.1x as long"),
        (10.0, 10.1, "equally soon"),
        (None, 10.0, "No ratio"),
    ],
)
def test_the_headline_says_which_way_the_ratio_goes(
    ours_s: float | None, theirs_s: float | None, words: str
) -> None:
    assert words in headline(a_document(ours_s, theirs_s))


def test_a_comparison_with_shed_or_failed_calls_is_called_void() -> None:
    document = a_document(1.0, 2.0)
    assert caveats(document) == []
    document["policies"]["talaria"]["shed"] = 1
    document["policies"]["round-only"]["calls_failed"] = 2
    assert all("void" in text for text in caveats(document))
    assert len(caveats(document)) == 2


def test_the_ratio_is_the_baselines_time_over_ours() -> None:
    assert speedup(a_document(10.0, 25.0), "talaria", "round-only") == 2.5
