"""The Python client against a gateway with scripted peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from talaria_client import Client, Rejected, Unavailable
from talaria_client import client as client_module
from talaria_common import subjects, wire
from talaria_common.bus import Msg
from talaria_common.errors import TalariaError
from talaria_common.memory_bus import MemoryBroker
from talaria_common.natsd import NatsServer
from talaria_common.testing import eventually
from talaria_common.wire import CallKey, Delta, EndReason, ToolDelta, Working

from .gateway_peers import MODEL, Emitter, World, go_on, world

HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as here:
        yield here


@pytest.fixture
async def client(here: World) -> AsyncIterator[Client]:
    async with Client("", bus=here.broker.connect("client")) as client:
        yield client


async def test_chunks_come_as_they_are_generated(client: Client, here: World) -> None:
    chunks = [chunk async for chunk in client.chat(model=MODEL, messages=HI, session="s1")]
    assert "".join(c.text for c in chunks) == "Hello"
    assert (chunks[-1].finish_reason, chunks[0].session) == ("stop", "s1")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_tokens == 8
    assert here.router.places[0].session == "s1"


async def test_a_whole_answer_has_text_calls_and_usage(client: Client, here: World) -> None:
    async def call(out: Emitter) -> None:
        await out.text("", ToolDelta(index=0, id="c1", name="ls", arguments='{"a"'))
        await out.text("", ToolDelta(index=0, arguments=": 1}"))
        await out.end("tool_calls")

    here.one.script = call
    answer = await client.complete(model=MODEL, messages=HI, max_tokens=9)
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("tool_calls", 2)
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == [("c1", "ls", '{"a": 1}')]
    assert here.router.places[0].max_tokens == 9


async def test_the_identity_of_a_call_travels_in_headers(client: Client, here: World) -> None:
    await client.complete(
        model=MODEL, messages=HI, session="c", parent="p", tenant="t", is_final=True
    )
    place = here.router.places[0]
    assert (place.session, place.parent, place.tenant, place.is_final) == ("c", "p", "t", True)


async def test_completions_and_models(client: Client) -> None:
    chunks = [c async for c in client.completions(model=MODEL, prompt="Once")]
    assert "".join(c.text for c in chunks) == "Hello"
    assert [m.id for m in await client.models()] == [MODEL]


async def test_leaving_the_loop_cancels_the_call(client: Client, here: World) -> None:
    here.one.script = go_on
    async for chunk in client.chat(model=MODEL, messages=HI):
        assert chunk.text
        break
    await eventually(lambda: here.one.cancelled, 2, "the instance is told")


async def test_cancelling_the_task_cancels_the_call(client: Client, here: World) -> None:
    here.one.script = go_on
    task = asyncio.create_task(client.complete(model=MODEL, messages=HI))
    await eventually(lambda: here.one.runs, 2, "the call runs")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: here.one.cancelled, 2, "the instance is told")


async def test_a_finished_call_is_not_cancelled(client: Client, here: World) -> None:
    await client.complete(model=MODEL, messages=HI)
    await asyncio.sleep(0)
    assert not here.admission.cancels


async def test_errors_have_their_kind_and_code(client: Client, here: World) -> None:
    with pytest.raises(Rejected) as rejected:
        await client.complete(model=MODEL, messages=HI, max_tokens=0)
    assert (rejected.value.code, rejected.value.param) == ("invalid_request", "max_tokens")


async def test_a_lost_message_is_an_error_and_never_a_gap_in_the_text(
    client: Client, here: World
) -> None:
    async def lossy(out: Emitter) -> None:
        await out.text("Hel")
        await out.text("lo", skip=1)
        await go_on(out)

    here.one.script = lossy
    chunks = client.chat(model=MODEL, messages=HI)
    assert (await anext(chunks)).text == "Hel"
    with pytest.raises(Unavailable) as lost:
        await anext(chunks)
    assert lost.value.code == "connection_lost"
    await eventually(lambda: here.one.cancelled, 2, "the rest is stopped")


async def test_a_lost_bus_ends_the_call_at_once(client: Client, here: World) -> None:
    async def one(out: Emitter) -> None:
        await out.text("Hel")

    here.one.script = one
    chunks = client.chat(model=MODEL, messages=HI)
    await anext(chunks)
    here.broker.down()
    with pytest.raises(TalariaError) as lost:
        await anext(chunks)
    assert lost.value.code == "bus_down"
    here.broker.up()


async def test_without_a_gateway_the_call_fails_at_once() -> None:
    async with Client("", bus=MemoryBroker().connect()) as client:
        with pytest.raises(Unavailable) as none:
            await client.complete(model=MODEL, messages=HI)
    assert none.value.code == "no_instance"


async def test_the_first_tokens_attempt_is_kept_to() -> None:
    broker = MemoryBroker()
    bus = broker.connect("gateway")

    async def two_attempts(message: Msg) -> None:
        call_id = message.headers["X-Talaria-Call-ID"]
        first, second = CallKey(call_id, 1), CallKey(call_id, 2)

        def ended(key: CallKey, seq: int, reason: EndReason) -> wire.Message:
            return wire.Ended(key=key, seq=seq, reason=reason, finish_reason="stop")

        for out in (
            Working(key=first, seq=1, state="queued"),
            ended(first, 2, EndReason.SUPERSEDED),
            Delta(key=second, seq=1, text="a"),
            Delta(key=first, seq=3, text="WRONG"),
            ended(first, 4, EndReason.FINISHED),
            Delta(key=second, seq=2, text="b"),
            ended(second, 3, EndReason.FINISHED),
        ):
            await bus.publish(message.reply, wire.encode_as(out, "json"))

    await bus.subscribe(subjects.CHAT, two_attempts)
    async with Client("", bus=broker.connect("client")) as client:
        assert (await client.complete(model=MODEL, messages=HI)).text == "ab"


async def test_silence_is_taken_for_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.1)
    broker = MemoryBroker()
    bus, cancels = broker.connect("gateway"), list[Any]()

    async def say_nothing(message: Msg) -> None:
        pass

    async def on_cancel(message: Msg) -> None:
        cancels.append(message)

    await bus.subscribe(subjects.CHAT, say_nothing)
    await bus.subscribe(subjects.ANY_CANCEL, on_cancel)
    async with Client("", bus=broker.connect("client")) as client:
        with pytest.raises(Unavailable) as lost:
            await client.complete(model=MODEL, messages=HI)
        assert lost.value.code == "connection_lost"
        await eventually(lambda: cancels, 2, "the call is cancelled")


async def test_the_client_connects_to_a_real_server(nats_server: NatsServer) -> None:
    async with Client.connect(nats_server.url) as client:
        with pytest.raises(Unavailable) as none:
            await client.complete(model=MODEL, messages=HI)
    assert none.value.code == "no_instance"
    with pytest.raises(Unavailable) as closed:
        await client.models()
    assert closed.value.code == "bus_down"
