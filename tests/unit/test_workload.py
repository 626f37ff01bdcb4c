"""Workloads: reading, generating, scaling, and the bodies made from them."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from talaria_common import chain
from talaria_sim.fit import Speed, estimate_s, fitted
from talaria_sim.texts import bodies
from talaria_sim.traces import load
from talaria_sim.workload import CallPlan, SessionPlan, Workload, WorkloadError, map_models

TRACES = Path(__file__).resolve().parents[3] / "shared/traces"

LINE = {
    "session": "run/task-1",
    "turn": 0,
    "model": "m0",
    "arrival_s": 0.0,
    "gap_before_s": None,
    "prompt_tokens": 900,
    "cached_prefix_tokens": 0,
    "provider_cached_tokens": 320,
    "output_tokens": 60,
    "tool": None,
    "task": "task-1",
    "unknown_key": 1,
}


def lines(*changes: dict[str, Any]) -> str:
    return "\n".join(json.dumps(LINE | change) for change in changes) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    later = {"turn": 1, "gap_before_s": 0.4, "prompt_tokens": 1300, "cached_prefix_tokens": 900}
    last = {"turn": 2, "gap_before_s": 9.0, "prompt_tokens": 800, "cached_prefix_tokens": 400}
    other = {"session": "run/other", "model": "m1"}
    path.write_text(lines(later, {}, last, other, other | later))
    return path


def test_a_normalised_file_becomes_sessions_in_the_order_of_turns(trace: Path) -> None:
    workload = load(str(trace))
    first = workload.sessions[0]
    assert [s.id for s in workload.sessions] == ["run/task-1", "run/other"]
    assert [c.prompt_tokens for c in first.calls] == [900, 1300, 800]
    assert [c.gap_s for c in first.calls] == [0.0, 0.4, 9.0]
    assert [first.extends(n) for n in range(3)] == [False, True, False]
    assert workload.labels == ("m0", "m1")


def test_a_compressed_file_reads_the_same(trace: Path) -> None:
    packed = trace.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert load(str(packed)).sessions == load(str(trace)).sessions


@pytest.mark.parametrize(
    ("name", "content", "words"),
    {
        "no file": ("missing.jsonl", None, "no such file"),
        "not json": ("x.jsonl", "{}\nnope\n", "line 1"),
        "bad value": ("x.jsonl", lines({}, {"prompt_tokens": -1}), "line 2"),
        "empty": ("x.jsonl", "\n\n", "holds no call"),
        "other kind": ("x.csv", "a,b", "want a .jsonl"),
        "not gzip": ("x.jsonl.gz", "plain", "x.jsonl.gz"),
        "no messages": ("x.json", '{"id": "s", "messages": [], "calls": []}', "holds no call"),
        "too many messages": (
            "x.json",
            '{"id": "s", "messages": [], "calls": [{"request_messages": 2}]}',
            "more messages than",
        ),
    }.values(),
)
def test_what_cannot_be_read_says_where(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(WorkloadError, match=words):
        load(str(path))


def test_a_folder_without_message_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="message files"):
        load(str(tmp_path))


RECORDED: dict[str, Any] = {
    "id": "agent/1",
    "model": "gpt",
    "tools": None,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "x" * 40},
        {"role": "user", "content": "More"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
    ],
    "calls": [{"request_messages": 2}, {"request_messages": 4}],
}


def test_a_recorded_session_without_counts_takes_lengths_from_its_replies(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDED))
    workload = load(str(tmp_path))
    first, second = workload.sessions[0].calls
    assert first.output_tokens == 42 // 4
    assert second.output_tokens >= 5
    assert (first.gap_s, second.gap_s) == (0.0, 0.5)
    assert any("bytes / 4" in note for note in workload.remarks)


def test_a_recorded_call_sends_the_recorded_messages_and_the_recorded_reply(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDED))
    session = load(str(tmp_path / "a.json")).sessions[0]
    first, second = bodies(session, "served", seed=0)
    assert first["messages"] == RECORDED["messages"][:2]
    assert second["messages"][2] == RECORDED["messages"][2]
    assert "tools" not in first
    assert first["model"] == "served"


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
def test_the_shared_traces_read() -> None:
    headline = load(str(TRACES / "dev30_first32.jsonl"))
    assert (len(headline.sessions), headline.calls, len(headline.labels)) == (30, 960, 3)
    recorded = load(str(TRACES / "messages"))
    assert len(recorded.sessions) == 10
    assert all(call.output_tokens > 0 for s in recorded.sessions for call in s.calls)
    assert any(note.startswith("2 recorded sessions") for note in recorded.remarks)
    assert len(recorded.limited(3).remarks) == 1


def test_generating_twice_gives_the_same_and_another_seed_another() -> None:
    spec = "gen:swe?sessions=4&calls=5&seed=7"
    assert load(spec) == load(spec)
    assert load(spec).sessions != load(spec, seed=8).sessions
    assert load(spec, seed=8).seed == 8


def test_a_longer_generated_workload_begins_like_a_shorter_one() -> None:
    short, long = (load(f"gen:swe?sessions={n}&calls=5") for n in (2, 6))
    assert long.sessions[:2] == short.sessions


def test_generated_sizes_follow_the_source() -> None:
    workload = load("gen:swe?sessions=150&calls=76")
    outputs = sorted(c.output_tokens for s in workload.sessions for c in s.calls)
    gaps = sorted(c.gap_s for s in workload.sessions for c in s.calls[1:])
    last = sorted(s.calls[-1].prompt_tokens for s in workload.sessions)
    assert outputs[len(outputs) // 2] == pytest.approx(90, rel=0.1)
    assert outputs[len(outputs) * 95 // 100] == pytest.approx(823, rel=0.1)
    assert gaps[len(gaps) // 2] == pytest.approx(0.26, rel=0.1)
    assert gaps[len(gaps) * 99 // 100] == pytest.approx(5.6, rel=0.25)
    assert 30_000 < last[75] < 45_000


def test_generated_labels_take_turns_and_gaps_are_cut() -> None:
    workload = load("gen:longlived?sessions=6&calls=9&models=2&gap_max=1.5")
    assert [s.label for s in workload.sessions] == ["m0", "m1"] * 3
    assert max(c.gap_s for s in workload.sessions for c in s.calls) == 1.5


def test_tailed_depths_spread_and_fixed_ones_do_not() -> None:
    depths = {len(s.calls) for s in load("gen:swe?sessions=30&calls=8&depths=tailed").sessions}
    assert len(depths) > 4
    assert {len(s.calls) for s in load("gen:swe?sessions=30&calls=8").sessions} == {8}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gen:sve", "did you mean 'swe'"),
        ("gen:swe?session=3", "did you mean 'sessions'"),
        ("gen:swe?sessions=0", "sessions"),
        ("gen:swe?sessions=many", "sessions"),
        ("gen:swe?sessions", "key=value"),
        ("gen:swe?depths=deep", "depths"),
    ],
)
def test_a_wrong_generator_spec_names_the_nearest(spec: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        load(spec)


def test_limits_keep_the_first_sessions_and_calls() -> None:
    workload = load("gen:swe?sessions=5&calls=7").limited(2, 3)
    assert (len(workload.sessions), workload.calls) == (2, 6)


def test_scales_apply_to_sizes_and_gaps_and_the_cut_comes_last() -> None:
    call = CallPlan(prompt_tokens=1000, shared_tokens=400, output_tokens=90, gap_s=4.0)
    session = SessionPlan(id="s", label="m", calls=(call,))
    workload = Workload(spec="", seed=0, sessions=(session,))
    scaled = workload.scaled(tokens=0.25, gaps=2.0, gap_max_s=5.0).sessions[0].calls[0]
    assert (scaled.prompt_tokens, scaled.shared_tokens, scaled.output_tokens) == (250, 100, 22)
    assert scaled.gap_s == 5.0
    with pytest.raises(WorkloadError):
        workload.scaled(tokens=0)


def a_prompt_grows(first: list[Any], second: list[Any]) -> bool:
    return second[: len(first)] == first and len(second) > len(first)


def test_synthetic_prompts_extend_each_other_as_an_agents_do() -> None:
    session = load("gen:swe?sessions=1&calls=6").scaled(tokens=0.25).sessions[0]
    prompts = [body["messages"] for body in bodies(session, "m", seed=1)]
    assert all(a_prompt_grows(a, b) for a, b in itertools.pairwise(prompts))
    reply, result = prompts[1][-2:]
    assert (reply["role"], result["role"]) == ("assistant", "tool")
    assert reply["tool_calls"][0]["id"] == result["tool_call_id"]
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"])["command"]


def test_synthetic_prompts_have_about_the_planned_size() -> None:
    session = load("gen:swe?sessions=1&calls=8").sessions[0]
    for call, body in zip(session.calls, bodies(session, "m", seed=1), strict=True):
        words = sum(len((m["content"] or "").split()) for m in body["messages"])
        assert call.prompt_tokens * 0.75 < words < call.prompt_tokens


def test_bodies_force_the_planned_length_and_are_deterministic() -> None:
    session = load("gen:swe?sessions=1&calls=3").sessions[0]
    made = bodies(session, "m", seed=1)
    assert made == bodies(session, "m", seed=1)
    assert made != bodies(session, "m", seed=2)
    for call, body in zip(session.calls, made, strict=True):
        assert body["max_tokens"] == call.output_tokens
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}


def test_sessions_share_the_system_message_and_sessions_of_a_task_the_whole_opening() -> None:
    workload = load("gen:swe?sessions=6&calls=1&models=3")
    opening = [bodies(s, "m", seed=1)[0]["messages"] for s in workload.sessions]
    assert len({messages[0]["content"] for messages in opening}) == 1
    same_task = opening[0][1]["content"].split()[:50]
    assert opening[1][1]["content"].split()[:50] == same_task
    assert opening[3][1]["content"].split()[:50] != same_task


def test_a_prompt_that_leaves_its_history_keeps_only_what_is_shared(trace: Path) -> None:
    session = load(str(trace)).sessions[0]
    before, after = (body["messages"] for body in bodies(session, "m", seed=1)[1:])
    assert not a_prompt_grows(before, after)
    assert after[0] == before[0]
    start = chain.root("", "m", None)
    shared = {link.digest for link in chain.links(start, before)}
    assert chain.links(start, after)[-1].digest not in shared


def test_labels_go_round_robin_unless_served_or_mapped() -> None:
    workload = load("gen:swe?sessions=4&calls=1&models=4")
    assert map_models(workload, ["a", "b", "m2"]) == {"m0": "a", "m1": "b", "m2": "m2", "m3": "a"}
    assert map_models(workload, ["a", "b"], {"m1": "a"})["m1"] == "a"
    with pytest.raises(WorkloadError, match="no model 'm9'"):
        map_models(workload, ["a"], {"m9": "a"})
    with pytest.raises(WorkloadError, match="did you mean 'tiny-a'"):
        map_models(workload, ["tiny-a"], {"m0": "tiny"})


def test_recorded_messages_go_to_the_first_served_model(tmp_path: Path) -> None:
    for name, model in (("a", "gpt"), ("b", "deepseek")):
        recorded = RECORDED | {"id": name, "model": model}
        (tmp_path / f"{name}.json").write_text(json.dumps(recorded))
    workload = load(str(tmp_path))
    assert set(map_models(workload, ["smollm2-135m", "tiny-a"]).values()) == {"smollm2-135m"}


FAST = Speed(prefill_token_s=0.0, decode_step_s=0.0)
SLOW = Speed(prefill_token_s=0.01, decode_step_s=0.1)


def a_plan(calls: int) -> Workload:
    plans = [
        CallPlan(prompt_tokens=100 * (n + 1), shared_tokens=100 * n if n else 0, output_tokens=10)
        for n in range(calls)
    ]
    session = SessionPlan(id="s", label="m0", calls=tuple(plans))
    return Workload(spec="", seed=0, sessions=(session,))


def test_an_estimate_counts_each_token_once_unless_it_is_reused() -> None:
    models, speeds = {"m0": "a"}, {"a": SLOW}
    assert estimate_s(a_plan(3), models, speeds, reused=0.0) == pytest.approx(6 + 3)
    assert estimate_s(a_plan(3), models, speeds, reused=1.0) == pytest.approx(3 + 3)


@pytest.mark.parametrize(
    ("speed", "budget_s", "calls"), [(FAST, 1.0, 6), (SLOW, 1e9, 6), (SLOW, 9.5, 3), (SLOW, 0.1, 2)]
)
def test_a_workload_is_cut_to_the_calls_that_fit_but_never_below_two(
    speed: Speed, budget_s: float, calls: int
) -> None:
    cut = fitted(a_plan(6), {"m0": "a"}, {"a": speed}, budget_s)
    assert [len(s.calls) for s in cut.sessions] == [calls]
