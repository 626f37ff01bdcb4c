"""The HTTP door against scripted peers: answers, errors, headers, health, metrics, sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from talaria_common.testing import eventually
from talaria_common.wire import EndReason, ErrorInfo, PlaceReply, Refused, SessionRow, ToolDelta
from talaria_gateway.config import GatewayConfig
from talaria_gateway.http_app import PortTaken
from talaria_gateway.service import GatewayService

from .gateway_peers import CONTEXT, MODEL, Emitter, World, chat, context, refuse, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as here:
        yield here


def sse(text: str) -> list[Any]:
    data = [b.removeprefix("data: ") for b in text.split("\n\n") if b.startswith("data: ")]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


async def test_a_call_is_answered_whole(here: World) -> None:
    answer = await here.post(headers={"X-Session-ID": "s1", "X-Request-ID": "r1"})
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert answer.headers["x-session-id"] == "s1"
    assert answer.headers["x-talaria-session-source"] == "header"
    assert answer.headers["x-request-id"] == "r1"


async def test_a_call_is_streamed_as_its_tokens_come(here: World) -> None:
    go = asyncio.Event()

    async def two_steps(out: Emitter) -> None:
        await out.text("Hel")
        await go.wait()
        await out.text("lo")
        await out.end()

    here.one.script = two_steps
    async with here.stream(stream_options={"include_usage": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-talaria-session-source"] == "derived"
        parts = answer.aiter_text()
        first = await anext(parts)
        assert '"Hel"' in first
        go.set()
        events = sse(first + "".join([part async for part in parts]))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 2


async def test_completions_are_served_too(here: World) -> None:
    body = {"model": MODEL, "prompt": "Once"}
    answer = await here.http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "Hello"
    assert here.one.runs[-1].endpoint == "completions"
    streamed = await here.http.post("/v1/completions", json=body | {"stream": True})
    assert [e["choices"][0]["text"] for e in sse(streamed.text)[:-1]] == ["Hel", "lo", ""]


async def test_tool_calls_come_through_streamed_and_whole(here: World) -> None:
    async def call(out: Emitter) -> None:
        await out.text("", ToolDelta(index=0, id="c1", name="ls", arguments='{"a"'))
        await out.text("", ToolDelta(index=0, arguments=": 1}"))
        await out.end("tool_calls")

    here.one.script = call
    whole = (await here.post()).json()["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "ls", "arguments": '{"a": 1}'}
    assert whole["finish_reason"] == "tool_calls"
    streamed = sse((await here.post(stream=True)).text)
    pieces = [c for e in streamed[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"a": 1}'


async def test_the_body_reaches_the_instance_as_it_came(here: World) -> None:
    raw = json.dumps(chat("Grüße 世界 😀", some_new_field={"a": [1]}), ensure_ascii=False).encode()
    assert (await here.post(raw)).status_code == 200
    assert here.one.bodies[-1] == raw


async def test_a_body_over_the_buss_limit_arrives_in_parts(here: World) -> None:
    raw = json.dumps(chat("word " * 1_000_000)).encode()
    assert (await here.post(raw)).status_code == 200
    assert here.one.bodies[-1] == raw
    assert here.one.runs[-1].parts > 1


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_413_with_the_limit(here: World, is_chunked: bool) -> None:
    raw = json.dumps(chat("x" * 9_000_000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 65536):
            yield raw[start : start + 65536]

    content: Any = pieces() if is_chunked else raw
    answer = await here.http.post("/v1/chat/completions", content=content)
    assert answer.status_code == 413
    assert "8000000" in answer.json()["error"]["message"]
    assert (await here.post()).status_code == 200


async def test_a_refused_call_has_its_error_and_all_headers(here: World) -> None:
    headers = {"X-Session-ID": "s1", "X-Request-ID": "r1"}
    answer = await here.post(headers=headers, max_tokens=0, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert answer.headers["x-session-id"] == "s1"
    assert answer.headers["x-request-id"] == "r1"
    assert not here.router.places


async def test_a_bad_session_header_is_a_400_that_names_it(here: World) -> None:
    answer = await here.post(headers={"X-Talaria-Session-ID": "x" * 257})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Talaria-Session-ID"
    assert answer.headers["x-talaria-session-source"] == "none"


async def test_an_unknown_model_is_404_and_never_placed(here: World) -> None:
    answer = await here.post(chat() | {"model": "no-such-model"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_model"
    assert not here.router.places
    assert "no-such-model" not in (await here.http.get("/metrics")).text


async def test_what_the_instance_calls_invalid_is_the_callers_400(here: World) -> None:
    error = ErrorInfo(
        code="context_length_exceeded", detail="4000 tokens of 2048", param="messages"
    )
    here.one.reply = lambda run: Refused(key=run.grant.key, reason="invalid", error=error)
    for stream in (False, True):
        answer = await here.post(stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "messages"
    assert not here.two.runs


async def test_overload_is_429_with_a_time(here: World) -> None:
    def full(place: Any) -> PlaceReply:
        return refuse(place, "overloaded", 2.5)

    here.router.decide = full
    answer = await here.post()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


async def test_a_failure_after_the_status_is_an_error_event_and_the_end(here: World) -> None:
    async def fail(out: Emitter) -> None:
        await out.text("Hel")
        error = ErrorInfo(code="model_failed", detail="out of memory")
        await out.end(None, reason=EndReason.FAILED, error=error)

    here.one.script = fail
    answer = await here.post(stream=True)
    assert answer.status_code == 200
    events = sse(answer.text)
    assert events[-1]["error"]["code"] == "model_failed"
    assert "[DONE]" not in events
    assert (await here.post()).status_code == 503


async def test_a_status_is_held_back_then_comments_keep_the_stream_open(here: World) -> None:
    go = asyncio.Event()

    async def late(out: Emitter) -> None:
        await go.wait()
        await out.text("Hi")
        await out.end()

    async def alive(out: Emitter) -> None:
        waiting = asyncio.create_task(late(out))
        while not waiting.done():
            await asyncio.sleep(0.1)
            if not go.is_set():
                await out.working()

    here.one.script = alive
    async with here.stream() as answer:
        parts = answer.aiter_text()
        assert (await anext(parts)).startswith(": ")
        go.set()
        assert sse("".join([part async for part in parts]))[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/no-such-path", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/no-such-model", 404),
        ("GET", "/v1/sessions/a/b/c", 404),
    ],
)
async def test_wrong_paths_and_methods_are_error_objects(
    here: World, method: str, path: str, status: int
) -> None:
    answer = await here.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_models_are_those_that_instances_report(here: World) -> None:
    listed = (await here.http.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [(MODEL, CONTEXT)]
    assert (await here.http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]


async def test_readiness_tells_what_is_missing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert (await here.http.get("/health/live")).status_code == 200
        here.broker.down()
        answer = await eventually(lambda: _not_ready(here.http), 3, "not ready without a bus")
        assert answer.json()["reasons"] == ["the message bus is down"]
        here.broker.up()
        for instance in here.instances:
            await instance.die()
        answer = await eventually(
            lambda: _says(here.http, "no instance is ready"), 5, "not ready without instances"
        )
        assert (await here.http.get("/health/live")).status_code == 200


async def _not_ready(http: httpx.AsyncClient) -> httpx.Response | None:
    answer = await http.get("/health/ready")
    return answer if answer.status_code == 503 else None


async def _says(http: httpx.AsyncClient, reason: str) -> httpx.Response | None:
    answer = await http.get("/health/ready")
    return answer if reason in answer.json()["reasons"] else None


async def test_a_call_is_counted_by_source_and_outcome_before_its_answer_ends(here: World) -> None:
    await here.post()
    assert await here.metric("talaria_calls_total", source="derived", outcome="finished") == 1
    await here.post(headers={"X-Session-ID": "s1"}, stream=True)
    assert await here.metric("talaria_calls_total", source="header", outcome="finished") == 1
    await here.post(max_tokens=0)
    assert await here.metric("talaria_calls_total", source="none", outcome="invalid_request") == 1


async def test_a_settled_call_has_measured_parts(here: World) -> None:
    await here.post(headers={"X-Session-ID": "s1", "X-Talaria-Session-Final": "true"})
    settled = await eventually(lambda: here.admission.settled, 2, "the call is settled")
    (call,) = settled
    assert (call.session, call.outcome, call.instance) == ("s1", "finished", "i-1")
    assert call.is_final
    assert call.ended_unix_s >= call.arrived_unix_s
    assert call.admit_s == 0.001
    assert call.place_s >= 0.001
    assert call.gateway_s > 0
    assert call.transfer_s > 0
    assert call.usage.cached_tokens == 8


async def test_sessions_are_told_and_ended_per_tenant(here: World) -> None:
    here.admission.rows = [SessionRow(id="a/b c", tenant="t1", source="header", calls=2)]
    path, mine = "/v1/sessions/a%2Fb%20c", {"X-Tenant-ID": "t1"}
    document = (await here.http.get(path, headers=mine)).json()
    assert (document["id"], document["calls"], document["parent"]) == ("a/b c", 2, None)
    assert "tenant" not in document
    explained = (await here.http.get(f"{path}/explain", headers=mine)).json()
    assert explained["decisions"][0]["reason"] == "ranked"
    listed = (await here.http.get("/v1/sessions", headers=mine)).json()
    assert [row["id"] for row in listed["data"]] == ["a/b c"]
    assert (await here.http.delete(path, headers=mine)).json()["state"] == "closed"
    for method, part in (("GET", ""), ("GET", "/explain"), ("DELETE", "")):
        answer = await here.http.request(method, path + part)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")
    assert (await here.http.get("/v1/sessions")).json() == {"data": []}


async def test_an_earlier_answer_names_the_session(here: World) -> None:
    first = await here.post(headers={"X-Session-ID": "s1"})
    second = await here.post(previous_response_id=first.json()["id"])
    assert second.headers["x-session-id"] == "s1"
    assert second.headers["x-talaria-session-source"] == "body"
    other = await here.post(
        chat(previous_response_id=first.json()["id"]), headers={"X-Tenant-ID": "t2"}
    )
    assert other.headers["x-talaria-session-source"] == "derived"


async def test_a_taken_port_is_named_with_the_way_out(here: World, tmp_path: Path) -> None:
    port = here.http.base_url.port
    other = GatewayService(
        context(here.broker, tmp_path, "gateway-2"), GatewayConfig(port=port or 1)
    )
    with pytest.raises(PortTaken) as taken:
        await other.start()
    await other.stop()
    assert str(port) in taken.value.detail
    assert "--port" in taken.value.detail
    assert "TALARIA_GATEWAY__PORT" in taken.value.detail
