"""The replay report: self-contained, complete, and safe with any name."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from talaria_common.wire import SlotReport
from talaria_sim import charts
from talaria_sim.metrics.summary import PARTS, summarise
from talaria_sim.records import CallRecord, RunRecord, SessionRecord
from talaria_sim.report import figure, render

MODELS = ("smollm2-135m", "tiny-a", "tiny-b")


def a_run(seed: int, slowness: float) -> RunRecord:
    rng = random.Random(seed)
    sessions: list[SessionRecord] = []
    for n in range(6):
        calls: list[CallRecord] = []
        at_s = 0.0
        for index in range(6):
            ttft_s, decode_s = rng.uniform(0.5, 2.5) * slowness, rng.uniform(1.0, 2.5)
            calls.append(
                CallRecord(
                    index=index,
                    intended_s=at_s,
                    first_token_s=at_s + ttft_s,
                    ended_s=at_s + ttft_s + decode_s,
                    outcome="finished",
                    prompt_tokens=500,
                    cached_tokens=400 if index else 0,
                    output_tokens=22,
                )
            )
            at_s += ttft_s + decode_s + rng.uniform(0.1, 1.0)
        sct_s = calls[-1].ended_s
        parts = dict.fromkeys(PARTS, 0.0) | {
            "tool_gap_s": 3.0,
            "queue_s": 0.3 * sct_s,
            "switch_s": 0.1 * sct_s,
            "prefill_s": 0.2 * sct_s,
            "decode_s": 0.4 * sct_s - 3.0,
        }
        sessions.append(
            SessionRecord(
                id=f"s{n:03d}",
                label=f"m{n % 3}",
                model=MODELS[n % 3],
                planned_calls=6,
                calls=tuple(calls),
                document={"sct_s": sct_s, "parts": parts},
            )
        )
    wall_s = max(s.calls[-1].ended_s for s in sessions)
    return RunRecord(
        sessions=tuple(sessions),
        slots=tuple(some_slots(wall_s, rng)),
        started_unix_s=1000.0,
        wall_s=wall_s,
    )


def some_slots(wall_s: float, rng: random.Random) -> list[SlotReport]:
    slots: list[SlotReport] = []
    at_s, n = 0.0, 0
    while at_s < wall_s:
        p, d1, sp, d = (rng.uniform(0.1, 0.6) for _ in range(4))
        switch_s = 0.2 if n else 0.0
        slots.append(
            SlotReport(
                instance="i-1",
                model=MODELS[n % 3],
                n=n,
                round_n=n // 3,
                opened_unix_s=1000.0 + at_s,
                switch_s=switch_s,
                active_s=p + d1 + sp + d,
                idle_s=0.0,
                phases=(("P", p), ("D1", d1), ("SP", sp), ("D", d)),
                sp_admitted=1,
            )
        )
        at_s += switch_s + p + d1 + sp + d
        n += 1
    return slots


def a_document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "workload": "gen:swe?sessions=6&calls=6",
        "seed": 1,
        "host": {"cpu": "a processor", "cores": 2},
        "engine": "torch",
        "policies": {"talaria": summarise(a_run(1, 1.0)), "round-only": summarise(a_run(2, 3.0))},
        "conditions": {"token scale": "0.25"},
        "notes": ["texts are synthetic"],
    }
    return document | changes


class Balanced(HTMLParser):
    """Fails where tags do not match, and keeps what the page refers to."""

    VOID = frozenset({"meta", "br", "line", "rect", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [f"{k}={v}" for k, v in attrs if k in {"src", "href"}]
        if tag not in self.VOID or (tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_refers_to_nothing_outside() -> None:
    page = Balanced()
    text = render(a_document())
    page.feed(text)
    assert page.open == []
    assert page.refers == []
    assert not re.search(r"https?://|url\(|@import", text)


def test_the_page_tells_headline_policies_sessions_and_slots() -> None:
    text = render(a_document())
    assert "x sooner than round-only" in text
    for word in ("talaria", "s005", "smollm2-135m", "texts are synthetic", "i-1", "switch"):
        assert word in text
    assert text.count("<svg") == 4


def test_a_name_is_never_markup() -> None:
    policies = {"<script>alert(1)</script>": summarise(a_run(1, 1.0))}
    text = render(a_document(policies=policies, workload="<b>"))
    assert "<script>" not in text
    assert "<b>" not in text


def test_a_page_without_slots_or_finished_sessions_still_renders() -> None:
    empty = summarise(RunRecord(sessions=(), started_unix_s=0.0, wall_s=0.0))
    text = render(a_document(policies={"talaria": empty}))
    assert "No session finished" in text
    assert "No slots were heard" in text


def test_failed_calls_are_named_before_the_figures() -> None:
    document = a_document()
    document["policies"]["talaria"]["calls_failed"] = 3
    text = render(document)
    assert text.index("3 calls failed") < text.index("Figures")


def test_cdf_steps_end_at_one_for_every_series() -> None:
    drawing = charts.cdf({"a": [1.0, 2.0], "b": [3.0]})
    ends = [line.split()[-1] for line in re.findall(r'points="([^"]+)"', drawing)]
    assert len(ends) == 2
    assert len({end.split(",")[1] for end in ends}) == 1


def test_bars_are_as_wide_as_their_share() -> None:
    drawing = charts.stacked_bars({"a": {"queue": 3.0, "decode": 1.0}})
    widths = [float(w) for w in re.findall(r'class="p-\w+"[^>]* width="([\d.]+)"', drawing)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)


@pytest.mark.parametrize("top", [0.003, 0.9, 7.3, 61.0, 1234.0])
def test_ticks_are_round_and_stay_inside(top: float) -> None:
    positions = charts.ticks(top)
    assert 3 <= len(positions) <= 8
    assert positions[-1] <= top * 1.000001


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("cached_share", 0.873, "87%"),
        ("switch_share", 0.034, "3.4%"),
        ("sct_p50_s", 123.456, "123.5"),
        ("ttft_p50_s", 1.234, "1.23"),
        ("tpot_p50_s", 0.0821, "0.082"),
        ("rounds", 12, "12"),
        ("sct_p50_s", None, "n/a"),
    ],
)
def test_figures_are_short(key: str, value: float | None, text: str) -> None:
    assert figure(key, value) == text
