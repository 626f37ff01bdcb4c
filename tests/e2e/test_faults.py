"""Faults under load: a killed instance, a killed bus. Real processes, the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from talaria_common.testing import OtlpSink, tree_problems
from tests.e2e.stacks import Stack, chat_body, descendants, events, eventually, running


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with OtlpSink() as sink:
        yield sink


# A prefill slow enough to be killed in: 2 ms a token.
SLOW_PREFILL = "[instance.fake]\nprefill_token_s = 0.002\n"


@pytest.fixture
def two_instances(sink: OtlpSink) -> Iterator[Stack]:
    args = ("--engine", "fake", "--instances", "2", "--processes", "--otlp", sink.url)
    with running(*args, config=SLOW_PREFILL) as stack:
        yield stack


def _session(http: httpx.Client, session: str) -> dict[str, Any]:
    return http.get(f"/v1/sessions/{session}").raise_for_status().json()  # type: ignore[no-any-return]


def test_a_killed_instance_ends_its_stream_and_its_session_goes_on_elsewhere(
    two_instances: Stack, sink: OtlpSink
) -> None:
    stack, headers = two_instances, {"X-Session-ID": "survivor"}
    with stack.http() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = chat_body(model, "Tell a long story.", max_tokens=2000, ignore_eos=True, stream=True)
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            stream = events(response)
            assert next(stream)
            home = _session(http, "survivor")["instance"]
            os.kill(stack.child("serve", "instance", home), signal.SIGKILL)
            rest = list(stream)
        assert isinstance(rest[-1], dict), rest[-1]
        assert rest[-1]["error"]["code"] in {"instance_lost", "connection_lost"}
        again = http.post(
            "/v1/chat/completions", json=chat_body(model, "Go on.", max_tokens=4), headers=headers
        )
        assert again.status_code == 200, again.text
        document = _session(http, "survivor")
        decisions = http.get("/v1/sessions/survivor/explain").json()["decisions"]
        assert document["calls"] == 2
        assert decisions[0]["instance"] == home != decisions[-1]["instance"]
        assert http.delete("/v1/sessions/survivor").status_code in (200, 204)
    eventually(
        lambda: not tree_problems(sink.spans) and len({s.trace_id for s in sink.spans}) == 1,
        15,
        f"one trace without orphans: {tree_problems(sink.spans)}",
    )


def test_a_call_accepted_but_without_a_token_is_placed_again_and_answered(
    two_instances: Stack,
) -> None:
    stack = two_instances
    with stack.http(60) as http, ThreadPoolExecutor(1) as pool:
        model = http.get("/v1/models").json()["data"][0]["id"]
        prompt = "word " * 4_000
        call = pool.submit(
            http.post,
            "/v1/chat/completions",
            json=chat_body(model, prompt, max_tokens=4),
            headers={"X-Session-ID": "moved"},
        )
        home = eventually(lambda: _home(stack, "moved"), 10, "the call is accepted somewhere")
        os.kill(stack.child("serve", "instance", home), signal.SIGKILL)
        answer = call.result()
        assert answer.status_code == 200, answer.text
        decisions = http.get("/v1/sessions/moved/explain").json()["decisions"]
        assert decisions[-1]["instance"] != home
        assert _session(http, "moved")["calls"] == 1


def _home(stack: Stack, session: str) -> str | None:
    with stack.http() as http:
        found = http.get(f"/v1/sessions/{session}")
        document = found.json() if found.status_code == 200 else {}
        return document.get("instance") if document.get("in_flight") else None


def test_a_dead_instance_gets_nothing_after_two_heartbeats(two_instances: Stack) -> None:
    stack = two_instances
    with stack.http() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        os.kill(stack.child("serve", "instance", "i-1"), signal.SIGSTOP)
        try:
            # Stopped, not killed: nobody answers for it and no responder tells. Three missed periods.
            eventually(
                lambda: _served_by(http, model) == "i-2", 10, "calls move to the other instance"
            )
            assert {_served_by(http, model) for _ in range(6)} == {"i-2"}
        finally:
            os.kill(stack.child("serve", "instance", "i-1"), signal.SIGCONT)


def _served_by(http: httpx.Client, model: str) -> str:
    answer = http.post("/v1/chat/completions", json=chat_body(model, "Hi.", max_tokens=1))
    assert answer.status_code == 200, answer.text
    return str(_session(http, answer.headers["x-session-id"])["instance"])


def test_a_restarted_bus_is_found_again_and_readiness_tells_the_truth() -> None:
    with running("--engine", "fake", "--processes") as stack, stack.http(20) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        stop, answers = threading.Event(), []

        def load(n: int) -> None:
            with stack.http(20) as mine:
                while not stop.is_set():
                    body = chat_body(model, f"Worker {n}.", max_tokens=20, ignore_eos=True)
                    answers.append(mine.post("/v1/chat/completions", json=body).status_code)

        workers = [threading.Thread(target=load, args=(n,)) for n in range(4)]
        for worker in workers:
            worker.start()
        before = {pid for pid, line in _services(stack)}
        eventually(lambda: len(answers) > 8, 20, "calls are answered before the fault")
        body = chat_body(model, "Long.", max_tokens=1500, ignore_eos=True, stream=True)
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            stream = events(response)
            assert next(stream)
            os.kill(stack.child("nats-server"), signal.SIGKILL)
            last = list(stream)[-1]
        assert isinstance(last, dict), last
        assert last["error"]["code"] == "bus_down"
        assert not _is_ready(stack), "ready without a bus"
        # The supervisor starts the server again on the same port.
        eventually(lambda: _listens(stack.nats_url), 20, "the server is back")
        eventually(lambda: _is_answered(stack, model), 3, "a new call within 3 s of its return")
        eventually(lambda: _is_ready(stack), 3, "ready again")
        stop.set()
        for worker in workers:
            worker.join(20)
            assert not worker.is_alive(), "a call hangs"
        answer = http.post("/v1/chat/completions", json=chat_body(model, "Back?", max_tokens=2))
        assert answer.status_code == 200, answer.text
        assert set(answers) <= {200, 502, 503}, set(answers)
        assert {pid for pid, line in _services(stack)} == before, "a service has exited"


def _services(stack: Stack) -> list[tuple[int, str]]:
    return [(pid, line) for pid, line in descendants(stack.process.pid) if " serve " in line]


def _listens(url: str) -> bool:
    at = httpx.URL(url)
    with contextlib.suppress(OSError), socket.create_connection((at.host, at.port or 4222), 1):
        return True
    return False


def _is_answered(stack: Stack, model: str) -> bool:
    with stack.http(3) as http:
        body = chat_body(model, "Back?", max_tokens=1)
        return http.post("/v1/chat/completions", json=body).status_code == 200


def _is_ready(stack: Stack) -> bool:
    with stack.http() as http:
        answer = http.get("/health/ready")
        assert answer.status_code in (200, 503)
        json.loads(answer.text)
        return answer.status_code == 200
