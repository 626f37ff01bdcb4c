"""One trace per session, across all services, complete."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from talaria_common.telemetry import Spans
from talaria_common.testing import OtlpSink, tree_problems
from tests.e2e.stacks import Stack, chat_body, eventually, in_flight, running


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with OtlpSink() as sink:
        yield sink


@pytest.fixture
def stack(sink: OtlpSink) -> Iterator[Stack]:
    args = ("--engine", "fake", "--instances", "2", "--processes", "--otlp", sink.url)
    with running(*args) as stack:
        yield stack


def test_each_session_is_one_tree_with_its_tool_gaps(stack: Stack, sink: OtlpSink) -> None:
    sessions, calls = ["trace-a", "trace-b"], 3
    with stack.http() as http:
        models = [m["id"] for m in http.get("/v1/models").json()["data"]]
        for turn in range(calls):
            for session, model in zip(sessions, models, strict=False):
                body = chat_body(model, f"Turn {turn}.", max_tokens=5, ignore_eos=True)
                answer = http.post(
                    "/v1/chat/completions", json=body, headers={"X-Session-ID": session}
                )
                assert answer.status_code == 200, answer.text
        for session in sessions:
            document = http.get(f"/v1/sessions/{session}").json()
            assert document["calls"] == calls
        # One client leaves in the middle; its session has a whole tree all the same.
        body = chat_body(models[0], "Leave.", max_tokens=1000, ignore_eos=True, stream=True)
        with http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"X-Session-ID": "trace-left"}
        ) as response:
            assert next(response.iter_raw())
        eventually(lambda: in_flight(http) == 0, 5, "the left call ends")
        for session in (*sessions, "trace-left"):
            assert http.delete(f"/v1/sessions/{session}").status_code in (200, 204)

    def problems() -> list[str]:
        found = tree_problems(sink.spans)
        for session in sessions:
            mine = [s for s in sink.spans if s.trace_id == Spans.trace_id("", session)]
            names = [s.name.split()[0] for s in mine]
            want = {
                "session": 1,
                "chat": calls,
                "place": calls,
                "admit": calls,
                "prefill": calls,
                "decode": calls,
                "tool_gap": calls - 1,
            }
            found += [f"{session}: no queue span"] * ("queue" not in names)
            found += [
                f"{session}: {names.count(name)} x {name}, not {count}"
                for name, count in want.items()
                if names.count(name) != count
            ]
        return found

    end_s = time.monotonic() + 15
    while problems() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert problems() == []
    services = {s.service for s in sink.spans}
    assert {"gateway", "router", "admission", "instance"} <= {s.split("-")[-1] for s in services}
