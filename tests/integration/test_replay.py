"""Closed-loop replay against a scripted endpoint over real HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from talaria_common import subjects, wire
from talaria_common.memory_bus import MemoryBroker
from talaria_common.testing import eventually, find_free_port
from talaria_common.wire import SlotReport
from talaria_sim.metrics.summary import summarise
from talaria_sim.replay import Progress, ReplayFailed, replay, served_models, warm_up
from talaria_sim.slots import SlotCollector
from talaria_sim.workload import CallPlan, SessionPlan, Workload

BLOCK = 16


class Endpoint:
    """An OpenAI-compatible server that answers as the test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], float]] = []
        self.closed: list[str] = []
        self.finals: list[str] = []
        self.refusals: Counter[str] = Counter()
        self.context_tokens = 1_000_000
        self.break_stream: Callable[[str, int], str | None] = lambda session, index: None
        self._seen: Counter[str] = Counter()
        self._earlier: dict[str, int] = {}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        session = request.headers["x-session-id"]
        if self.refusals[session] > 0:
            self.refusals[session] -= 1
            return _error(429, "overloaded", {"Retry-After": "0.1"})
        prompt_tokens = sum(len((m["content"] or "").split()) for m in body["messages"])
        if prompt_tokens > self.context_tokens:
            return _error(400, "context_length_exceeded")
        index = self._seen[session]
        self._seen[session] += 1
        self.calls.append((session, body, time.monotonic()))
        if request.headers.get("x-talaria-session-final") == "true":
            self.finals.append(session)
        cached = self._earlier.get(session, 0) // BLOCK * BLOCK
        self._earlier[session] = prompt_tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        stream = self._stream(self.break_stream(session, index), body["max_tokens"], usage)
        if not body.get("stream"):
            return JSONResponse({"choices": [], "usage": usage})
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(
        self, fault: str | None, tokens: int, usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        yield b": keep-alive\n\n"
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.05)
        for n in range(tokens):
            yield _event({"choices": [{"index": 0, "delta": {"content": f"w{n} "}}]})
            if fault == "cut":
                return
            if fault == "error":
                yield _event({"error": {"code": "instance_lost", "message": "it has gone"}})
                return
            await asyncio.sleep(0.01)
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "a"}, {"id": "b"}]})

    async def session(self, request: Request) -> Response:
        session = request.path_params["id"]
        if request.method == "DELETE":
            self.closed.append(session)
        parts = {"decode_s": 1.0, "unattributed_s": 0.0}
        return JSONResponse({"id": session, "sct_s": 1.0, "parts": parts})


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _error(status: int, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": "no", "type": "x", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[str]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/models", endpoint.models),
            Route("/v1/sessions/{id:path}", endpoint.session, methods=["GET", "DELETE"]),
        ]
    )
    port = find_free_port()
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_level="error", lifespan="off", ws="none")
    )
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, 5, "the stub listens")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await task


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
async def url(endpoint: Endpoint) -> AsyncIterator[str]:
    async with serving(endpoint) as url:
        yield url


def a_workload(sessions: int = 2, calls: int = 3, gap_s: float = 0.0) -> Workload:
    plans = [
        CallPlan(
            prompt_tokens=400 + 100 * n,
            shared_tokens=400 + 100 * (n - 1) if n else 0,
            output_tokens=5,
            gap_s=gap_s if n else 0.0,
        )
        for n in range(calls)
    ]
    return Workload(
        spec="test",
        seed=1,
        sessions=tuple(
            SessionPlan(id=f"s/{n}", label="m0", task=str(n), calls=tuple(plans))
            for n in range(sessions)
        ),
    )


MODELS = {"m0": "a"}


async def test_every_call_is_sent_once_in_order_with_its_sessions_id(
    endpoint: Endpoint, url: str
) -> None:
    record = await replay(a_workload(3, 4), MODELS, url)
    entry = summarise(record)
    assert (entry["calls_finished"], entry["calls_failed"], entry["sessions_finished"]) == (
        12,
        0,
        3,
    )
    for session in ("s/0", "s/1", "s/2"):
        lengths = [len(body["messages"]) for name, body, _ in endpoint.calls if name == session]
        assert lengths == [2, 4, 6, 8]
    assert sorted(endpoint.finals) == ["s/0", "s/1", "s/2"]
    assert endpoint.closed == []


async def test_gaps_are_kept_and_part_of_the_completion_time(endpoint: Endpoint, url: str) -> None:
    record = await replay(a_workload(1, 3, gap_s=0.3), MODELS, url)
    session = record.sessions[0]
    assert session.sct_s is not None
    assert session.sct_s >= 0.6 + 3 * 0.05
    for before, call in zip(session.calls, session.calls[1:], strict=False):
        assert call.intended_s == pytest.approx(before.ended_s + 0.3)
        assert endpoint.calls[call.index][2] - endpoint.calls[before.index][2] >= 0.3


async def test_all_sessions_start_at_once(endpoint: Endpoint, url: str) -> None:
    await replay(a_workload(8, 1), MODELS, url)
    arrivals = [at_s for _, _, at_s in endpoint.calls]
    assert max(arrivals) - min(arrivals) < 0.05 * 8 + 0.5
    assert len({session for session, _, _ in endpoint.calls}) == 8


async def test_the_first_token_is_the_first_text_not_the_role_or_a_comment(
    endpoint: Endpoint, url: str
) -> None:
    record = await replay(a_workload(1, 1), MODELS, url)
    call = record.sessions[0].calls[0]
    assert call.first_token_s is not None
    assert call.first_token_s - call.intended_s >= 0.05
    assert call.ended_s > call.first_token_s
    assert call.output_tokens == 5


async def test_continuations_tell_whether_their_earlier_prompt_was_cached(
    endpoint: Endpoint, url: str
) -> None:
    record = await replay(a_workload(1, 3), MODELS, url)
    assert [c.covers_before for c in record.sessions[0].calls] == [None, True, True]
    assert summarise(record)["continuations_covered"] == 2


async def test_a_refused_call_is_sent_again_after_retry_after_and_counted_once(
    endpoint: Endpoint, url: str
) -> None:
    endpoint.refusals["s/0"] = 2
    record = await replay(a_workload(2, 2), MODELS, url)
    entry = summarise(record)
    assert (entry["shed"], entry["calls_failed"], entry["calls_finished"]) == (1, 0, 4)
    first = record.sessions[0].calls[0]
    assert first.first_token_s is not None
    assert first.first_token_s - first.intended_s >= 0.2


async def test_a_session_stops_where_its_prompt_exceeds_the_context(
    endpoint: Endpoint, url: str
) -> None:
    endpoint.context_tokens = 350
    progress = Progress(1, 5)
    record = await replay(a_workload(1, 5), MODELS, url, progress=progress)
    entry = summarise(record)
    assert entry["cut_by_context"] == 1
    assert entry["calls_failed"] == 0
    assert 1 <= entry["calls_finished"] < 5
    assert progress.calls == progress.calls_done == entry["calls_finished"]
    assert endpoint.closed == ["s/0"]


@pytest.mark.parametrize(("fault", "words"), [("cut", "cut_off"), ("error", "instance_lost")])
async def test_a_broken_stream_fails_its_call_and_ends_its_session(
    endpoint: Endpoint, url: str, fault: str, words: str
) -> None:
    endpoint.break_stream = lambda session, index: fault if (session, index) == ("s/1", 1) else None
    record = await replay(a_workload(2, 3), MODELS, url)
    entry = summarise(record)
    assert (entry["calls_failed"], entry["calls_finished"]) == (1, 4)
    assert entry["sessions_finished"] == 1
    assert words in entry["errors"][0]
    assert endpoint.closed == ["s/1"]


async def test_an_endpoint_that_has_gone_fails_calls_instead_of_raising() -> None:
    record = await replay(a_workload(1, 2), MODELS, f"http://127.0.0.1:{find_free_port()}")
    assert summarise(record)["calls_failed"] == 1
    assert record.sessions[0].sct_s is None


async def test_session_documents_come_from_the_stack(endpoint: Endpoint, url: str) -> None:
    record = await replay(a_workload(2, 1), MODELS, url, id_prefix="run-")
    assert [s.document and s.document["id"] for s in record.sessions] == ["run-s/0", "run-s/1"]
    assert summarise(record)["parts_s"]["decode_s"] == 2.0


async def test_models_are_those_that_the_endpoint_lists(endpoint: Endpoint, url: str) -> None:
    assert await served_models(url) == ["a", "b"]
    with pytest.raises(ReplayFailed, match="talaria up"):
        await served_models(f"http://127.0.0.1:{find_free_port()}")


async def test_warming_up_touches_each_model_and_measures_its_speed(
    endpoint: Endpoint, url: str
) -> None:
    speeds = await warm_up(url, ["a", "b"])
    assert {body["model"] for _, body, _ in endpoint.calls} == {"a", "b"}
    assert set(endpoint.finals) == {session for session, _, _ in endpoint.calls}
    assert speeds["a"].decode_step_s == pytest.approx(0.01, rel=0.5)
    assert speeds["b"].prefill_token_s >= 0.05 / 128
    endpoint.refusals.update(["warm-up, measured, b"])
    with pytest.raises(ReplayFailed, match="b does not answer: 429"):
        await warm_up(url, ["a", "b"])


async def test_slots_are_collected_in_order_of_opening_and_garbage_is_skipped() -> None:
    broker = MemoryBroker()
    here, there = broker.connect(), broker.connect()
    async with SlotCollector(here) as collector:
        for n in (2, 1):
            report = SlotReport(
                instance="i-1",
                model="a",
                n=n,
                round_n=1,
                opened_unix_s=float(n),
                switch_s=0.1,
                active_s=1.0,
                idle_s=0.0,
            )
            await there.publish(subjects.slots("i-1"), wire.encode(report))
        await there.publish(subjects.slots("i-1"), b"\xff garbage")
        await eventually(lambda: len(collector.slots) == 2, 2, "both slots are heard")
    assert [slot.n for slot in collector.slots] == [1, 2]
    await here.close()
    await there.close()
