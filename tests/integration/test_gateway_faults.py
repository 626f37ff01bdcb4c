"""What the gateway does when clients leave, instances die and messages are lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from talaria_common import subjects
from talaria_common.testing import eventually
from talaria_common.wire import Accepted, Refused

from .gateway_peers import (
    Emitter,
    StubInstance,
    World,
    chat,
    go_on,
    say_hello,
    say_nothing,
    world,
)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as here:
        yield here


def errors(text: str) -> list[str]:
    data = [b.removeprefix("data: ") for b in text.split("\n\n") if b.startswith("data: {")]
    return [json.loads(d)["error"]["code"] for d in data if '"error"' in d]


# --- the client leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("moment", ["queued", "running"])
async def test_a_client_that_leaves_stops_the_work(here: World, stream: bool, moment: str) -> None:
    async def queued(out: Emitter) -> None:
        while True:
            await out.working()
            await asyncio.sleep(0.1)

    here.one.script = go_on if moment == "running" else queued
    call = asyncio.create_task(here.post(stream=stream))
    await eventually(lambda: here.one.runs, 2, "the call runs")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    key = here.one.runs[0].grant.key
    await eventually(lambda: key in here.one.cancelled, 1, "the instance is told")
    await eventually(lambda: here.admission.cancels.count(key.call_id) >= 3, 3, "all are told")
    assert await here.metric("talaria_calls_total", outcome="cancelled") == 1
    (settled,) = here.admission.settled
    assert settled.outcome == "cancelled"
    assert len(here.one.runs) == 1


async def test_a_client_that_leaves_while_being_placed_is_never_run(here: World) -> None:
    here.router.decide = lambda place: None
    call = asyncio.create_task(here.post())
    await eventually(lambda: here.router.places, 2, "the call is being placed")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    call_id = here.router.places[0].key.call_id
    await eventually(lambda: call_id in here.admission.cancels, 1, "the cancel is told")
    assert not here.one.runs


async def test_a_published_cancel_ends_the_call(here: World) -> None:
    here.one.script = go_on
    async with here.stream() as answer:
        parts = answer.aiter_text()
        await anext(parts)
        call_id = here.one.runs[0].grant.key.call_id
        cancel = json.dumps({"type": "cancel_call", "call_id": call_id}).encode()
        await here.bus.publish(subjects.cancel(call_id), cancel)
        assert errors("".join([part async for part in parts])) == ["cancelled"]
    await eventually(lambda: here.one.cancelled, 1, "the instance is told")


BEHIND: dict[str, dict[str, Any]] = {
    "for too long": {"reader_behind_s": 0.3, "reader_bytes_max": 10**9},
    "by too much": {"reader_behind_s": 60.0, "reader_bytes_max": 5_000_000},
}


@pytest.mark.parametrize("settings", BEHIND.values(), ids=BEHIND.keys())
async def test_a_reader_that_is_behind_is_cut(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def flood(out: Emitter) -> None:
        while True:
            await out.text("x" * 100_000)
            await asyncio.sleep(0.005)

    async with world(tmp_path, **settings) as here:
        here.one.script = flood
        url = here.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port, limit=1000)
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await eventually(lambda: here.one.cancelled, 5, "the reader is cut")
        writer.transport.abort()
        here.one.script = say_hello
        assert (await here.post()).status_code == 200


# --- placed again before the first token ----------------------------------------------------------


async def test_a_refusal_goes_to_another_instance(here: World) -> None:
    here.one.reply = lambda run: Refused(key=run.grant.key, reason="full")
    answer = await here.post(headers={"X-Session-ID": "s1"})
    assert answer.status_code == 200
    assert answer.headers["x-session-id"] == "s1"
    assert [p.excluded for p in here.router.places] == [(), ("i-1",)]
    assert [p.key.attempt for p in here.router.places] == [1, 2]
    assert await here.metric("talaria_call_retries_total", reason="refused") == 1


async def test_everybody_full_is_overloaded(here: World) -> None:
    for instance in here.instances:
        instance.reply = lambda run: Refused(key=run.grant.key, reason="full")
    answer = await here.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert answer.headers["retry-after"]


async def test_an_instance_that_is_gone_is_passed_over_at_once(here: World) -> None:
    await here.one.die()
    answer = await here.post()
    assert answer.status_code == 200
    assert answer.elapsed.total_seconds() < 0.3
    assert here.router.places[-1].excluded == ("i-1",)


async def test_a_run_without_an_answer_is_cancelled_and_placed_anew(here: World) -> None:
    here.one.reply = lambda run: None
    answer = await here.post()
    assert answer.status_code == 200
    assert here.router.places[-1].ranked_last == ("i-1",)
    first = here.one.runs[0].grant.key
    await eventually(lambda: first in here.one.cancelled, 2, "the lost attempt is stopped")


async def test_a_token_counts_as_acceptance(here: World) -> None:
    def silent_yes(run: Any) -> None:
        here.one.play(run)

    here.one.reply = silent_yes
    assert (await here.post()).json()["choices"][0]["message"]["content"] == "Hello"
    assert len(here.one.runs) == 1
    assert not here.two.runs


async def test_late_tokens_of_a_left_attempt_are_not_mixed_in(here: World) -> None:
    left: list[Emitter] = []

    async def late(out: Emitter) -> None:
        left.append(out)

    async def mixed(out: Emitter) -> None:
        await left[0].text("WRONG")
        await say_hello(out)
        await left[0].end()

    here.one.script, here.two.script = late, mixed
    answer = await here.post()
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


async def test_an_accepted_call_without_a_token_survives_its_instance(here: World) -> None:
    here.one.script = say_nothing
    call = asyncio.create_task(here.post(stream=True, headers={"X-Session-ID": "s1"}))
    await eventually(lambda: here.one.runs, 2, "the call is accepted")
    await here.one.die()
    answer = await call
    assert answer.text.endswith("data: [DONE]\n\n")
    assert here.router.places[-1].excluded == ("i-1",)
    assert await here.metric("talaria_call_retries_total", reason="instance_lost") == 1


async def test_silence_before_the_first_token_places_the_call_again(here: World) -> None:
    here.one.script = say_nothing
    answer = await here.post()
    assert answer.status_code == 200
    assert await here.metric("talaria_call_retries_total", reason="silence") == 1
    await eventually(lambda: here.one.cancelled, 2, "the silent attempt is stopped")


async def test_a_call_waits_for_a_router_that_is_started_again(here: World) -> None:
    await here.router.die()
    call = asyncio.create_task(here.post())
    done, _ = await asyncio.wait([call], timeout=1.5)
    assert not done, call.result().text
    await here.router.start()
    assert (await call).status_code == 200


async def test_an_answer_for_another_call_is_no_answer(here: World) -> None:
    here.router.decide = _wrong_once(here)
    assert (await here.post()).status_code == 200
    assert [p.key.attempt for p in here.router.places] == [1, 1]


def _wrong_once(here: World) -> Any:
    def decide(place: Any) -> Any:
        reply = here.router.first(place)
        if len(here.router.places) > 1:
            return reply
        other = msgspec.structs.replace(reply.grant, key=type(place.key)("other"))  # type: ignore[union-attr]
        return msgspec.structs.replace(reply, grant=other)

    return decide


async def test_no_router_is_503(tmp_path: Path) -> None:
    async with world(tmp_path, place_timeout_s=0.1) as here:
        here.router.decide = lambda place: None
        answer = await here.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
        assert len(here.router.places) == 3
        assert len({p.key for p in here.router.places}) == 1


# --- after the first token ------------------------------------------------------------------------


async def test_a_killed_instance_ends_its_stream_with_an_error_event(here: World) -> None:
    here.one.script = go_on
    async with here.stream() as answer:
        parts = answer.aiter_text()
        await anext(parts)
        await here.one.die()
        rest = "".join([part async for part in parts])
    assert errors(rest) == ["instance_lost"]
    assert "[DONE]" not in rest
    assert not here.two.runs


async def test_a_restarted_instance_has_lost_its_calls(here: World) -> None:
    async def once(out: Emitter) -> None:
        await out.text("x")

    here.one.script = once
    async with here.stream() as answer:
        parts = answer.aiter_text()
        await anext(parts)
        await here.one.die()
        again = StubInstance(here.broker.connect("again"), "i-1", boot_id="b2")
        await again.start()
        assert errors("".join([part async for part in parts])) == ["instance_lost"]
        await again.die()


async def test_a_gap_in_the_stream_is_an_error_and_never_hidden(here: World) -> None:
    async def lossy(out: Emitter) -> None:
        await out.text("Hel")
        await out.text("lo", skip=1)
        await out.end()

    here.one.script = lossy
    answer = await here.post(stream=True)
    assert errors(answer.text) == ["connection_lost"]
    assert "a part of the answer was lost" in answer.text
    assert '"lo"' not in answer.text
    await eventually(lambda: here.one.cancelled, 2, "the rest is stopped")


async def test_a_repeated_message_is_taken_once(here: World) -> None:
    async def twice(out: Emitter) -> None:
        await out.text("Hel")
        out.seq -= 1
        await out.text("Hel")
        await out.text("lo")
        await out.end()

    here.one.script = twice
    assert (await here.post()).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_lost_bus_ends_open_streams_and_refuses_new_calls_until_it_is_back(
    here: World,
) -> None:
    here.one.script = go_on
    async with here.stream() as answer:
        parts = answer.aiter_text()
        await anext(parts)
        here.broker.down()
        assert errors("".join([part async for part in parts])) == ["bus_down"]
    refused = await here.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_down")
    assert refused.headers["retry-after"] == "1"
    here.broker.up()
    key = here.one.runs[0].grant.key
    await eventually(lambda: key in here.one.cancelled, 3, "the orphan is stopped")
    here.one.script = say_hello
    assert (await here.post()).status_code == 200


# --- the gateway itself ---------------------------------------------------------------------------


async def test_draining_ends_open_calls_and_takes_no_new_ones(here: World) -> None:
    go = asyncio.Event()

    async def late(out: Emitter) -> None:
        await out.text("Hi")
        await go.wait()
        await out.end()

    here.one.script = late
    call = asyncio.create_task(here.post())
    await eventually(lambda: here.one.runs, 2, "the call runs")
    draining = asyncio.create_task(here.service.drain())
    await asyncio.sleep(0)
    refused = await here.post()
    assert refused.status_code == 429
    go.set()
    assert (await call).status_code == 200
    await draining


async def test_more_open_calls_than_the_limit_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path, calls_max=1) as here:
        here.one.script = go_on
        call = asyncio.create_task(here.post())
        await eventually(lambda: here.one.runs, 2, "the first call runs")
        refused = await here.post()
        assert refused.status_code == 429
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_body_that_stops_coming_is_given_up(tmp_path: Path) -> None:
    async with world(tmp_path, body_silence_s=0.2) as here:
        url = here.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_many_calls_at_once_are_all_answered(here: World) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=here.http.base_url, limits=limits, timeout=20, trust_env=False
    ) as http:
        calls = [
            http.post("/v1/chat/completions", json=chat(f"{n}", stream=n % 2 == 0))
            for n in range(60)
        ]
        answers = await asyncio.gather(*calls)
    assert {a.status_code for a in answers} == {200}
    assert await here.metric("talaria_gateway_calls_open") == 0


async def test_an_early_acceptance_and_its_tokens_are_one_answer(here: World) -> None:
    """The reply and the stream travel on two connections: either may come first."""
    here.one.reply = lambda run: Accepted(key=run.grant.key, prompt_tokens=10)
    for _ in range(5):
        assert (await here.post()).json()["choices"][0]["message"]["content"] == "Hello"
