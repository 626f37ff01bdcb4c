"""The NATS door against scripted peers: bodies in, public messages out, retries on certain news."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from talaria_common import subjects, wire
from talaria_common.bus import Msg
from talaria_common.ids import new_ulid
from talaria_common.testing import eventually
from talaria_common.wire import CallStarted, Delta, Ended, EndReason, ErrorInfo, Refused, Working

from .gateway_peers import FAST, MODEL, Emitter, World, chat, go_on, say_nothing, world


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as here:
        yield here


class Caller:
    """A NATS caller that keeps all that comes."""

    def __init__(self, here: World) -> None:
        self.bus = here.bus
        self.inbox = self.bus.new_inbox()
        self.came: list[wire.PublicMessage] = []

    async def call(
        self, body: Any = None, headers: dict[str, str] | None = None, subject: str = subjects.CHAT
    ) -> None:
        await self.bus.listen(self.inbox, self._keep)
        payload = json.dumps(body or chat()).encode()
        await self.bus.publish(subject, payload, reply=self.inbox, headers=headers)

    async def _keep(self, message: Msg) -> None:
        self.came.append(wire.PUBLIC.decode(message.payload))

    async def end(self) -> Ended:
        """The last message."""
        await eventually(lambda: self.came and isinstance(self.came[-1], Ended), 5, "the call ends")
        last = self.came[-1]
        assert isinstance(last, Ended)
        return last

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.came if isinstance(m, kind)]


async def test_a_call_starts_streams_and_ends_on_the_callers_inbox(here: World) -> None:
    caller, call_id = Caller(here), new_ulid()
    await caller.call(headers={"X-Session-ID": "s1", "X-Talaria-Call-ID": call_id})
    ended = await caller.end()
    started = caller.came[0]
    assert isinstance(started, CallStarted)
    assert (started.call_id, started.session, started.source) == (call_id, "s1", "header")
    assert (started.model, started.instance) == (MODEL, "i-1")
    assert "".join(d.text for d in caller.of(Delta)) == "Hello"
    assert (ended.reason, ended.finish_reason) == (EndReason.FINISHED, "stop")
    assert here.one.runs[0].encoding == "json"
    await eventually(lambda: here.admission.settled, 2, "the call is settled")
    assert here.admission.settled[0].outcome == "finished"
    assert await here.metric("talaria_calls_total", source="header", outcome="finished") == 1


async def test_completions_and_models_have_subjects_of_their_own(here: World) -> None:
    caller = Caller(here)
    await caller.call({"model": MODEL, "prompt": "Once"}, subject=subjects.COMPLETIONS)
    await caller.end()
    assert here.one.runs[0].endpoint == "completions"
    models = await here.bus.request(subjects.MODELS, b"", timeout_s=1)
    assert [m["id"] for m in json.loads(models.payload)["data"]] == [MODEL]


@pytest.mark.parametrize(
    ("body", "headers", "code", "param"),
    [
        (chat(max_tokens=0), {}, "invalid_request", "max_tokens"),
        (chat() | {"model": "none"}, {}, "unknown_model", "model"),
        (chat(), {"X-Session-ID": "x" * 257}, "invalid_request", "X-Session-ID"),
        (chat(), {"X-Talaria-Call-ID": "seven"}, "invalid_request", None),
    ],
)
async def test_a_bad_call_ends_at_once_with_its_error(
    here: World, body: Any, headers: dict[str, str], code: str, param: str | None
) -> None:
    caller = Caller(here)
    await caller.call(body, headers)
    ended = await caller.end()
    assert ended.reason is EndReason.FAILED
    assert ended.error is not None
    assert (ended.error.code, ended.error.param) == (code, param)
    assert len(caller.came) == 1


async def test_an_open_call_id_is_not_taken_twice(here: World) -> None:
    here.one.script = go_on
    first, second, call_id = Caller(here), Caller(here), new_ulid()
    await first.call(headers={"X-Talaria-Call-ID": call_id})
    await eventually(lambda: first.of(Delta), 2, "the first call runs")
    await second.call(headers={"X-Talaria-Call-ID": call_id})
    assert (await second.end()).error is not None
    assert len(here.one.runs) == 1


async def test_a_cancel_stops_the_attempt_and_ends_the_call(here: World) -> None:
    here.one.script = go_on
    caller, call_id = Caller(here), new_ulid()
    await caller.call(headers={"X-Talaria-Call-ID": call_id})
    await eventually(lambda: caller.of(Delta), 2, "tokens flow")
    await here.bus.publish(
        subjects.cancel(call_id), b'{"type": "cancel_call", "call_id": "%s"}' % call_id.encode()
    )
    assert (await caller.end()).reason is EndReason.CANCELLED
    await eventually(lambda: here.one.cancelled, 1, "the instance is told")
    assert await here.metric("talaria_calls_total", outcome="cancelled") == 1


async def test_a_cancel_that_overtakes_its_call_holds(here: World) -> None:
    caller, call_id = Caller(here), new_ulid()
    await here.bus.publish(subjects.cancel(call_id), b"")
    await caller.call(headers={"X-Talaria-Call-ID": call_id})
    assert (await caller.end()).reason is EndReason.CANCELLED
    assert not here.one.runs


async def test_a_refusal_is_placed_again(here: World) -> None:
    here.one.reply = lambda run: Refused(key=run.grant.key, reason="full")
    caller = Caller(here)
    await caller.call()
    await caller.end()
    assert [s.instance for s in caller.of(CallStarted)] == ["i-1", "i-2"]


@pytest.mark.parametrize("outcome", ["unknown", "stopped"])
async def test_a_withdrawn_run_is_placed_again(here: World, outcome: str) -> None:
    here.one.reply = lambda run: None
    here.one.withdrawn = lambda key: outcome
    caller = Caller(here)
    await caller.call()
    assert (await caller.end()).reason is EndReason.FINISHED
    assert len(here.one.withdrawals) == 1
    assert len(here.two.runs) == 1


async def test_a_run_whose_tokens_flow_is_stayed_with(here: World) -> None:
    here.one.reply = lambda run: None
    here.one.withdrawn = lambda key: "tokens"
    caller = Caller(here)
    await caller.call()
    await eventually(lambda: here.one.withdrawals, 3, "the gateway asks")
    here.one.play(here.one.runs[0])
    assert (await caller.end()).reason is EndReason.FINISHED
    assert not here.two.runs


async def test_without_certain_news_a_run_is_never_repeated(here: World) -> None:
    here.one.reply = lambda run: None
    caller = Caller(here)
    await caller.call()
    ended = await caller.end()
    assert ended.error is not None
    assert ended.error.code == "instance_unreachable"
    assert len(here.one.withdrawals) >= 3
    assert not here.two.runs


async def test_the_caller_hears_something_each_second_until_acceptance(here: World) -> None:
    here.router.decide = lambda place: None
    caller = Caller(here)
    await caller.call()
    await eventually(lambda: caller.of(Working), 3, "signs of life")
    assert {w.state for w in caller.of(Working)} == {"placing"}
    await caller.end()


async def test_an_instance_that_dies_with_a_silent_call_is_replaced(here: World) -> None:
    here.one.script = say_nothing
    caller = Caller(here)
    await caller.call()
    await eventually(lambda: here.one.runs, 2, "accepted")
    await here.one.die()
    assert (await caller.end()).reason is EndReason.FINISHED
    assert len(here.two.runs) == 1


async def test_an_instance_that_dies_after_a_token_ends_the_call(here: World) -> None:
    here.one.script = go_on
    caller = Caller(here)
    await caller.call()
    await eventually(lambda: caller.of(Delta), 2, "tokens flow")
    await asyncio.sleep(0)
    await here.one.die()
    ended = await caller.end()
    assert ended.error is not None
    assert ended.error.code == "instance_lost"
    assert not here.two.runs


async def test_a_call_whose_end_got_lost_ends_once_its_instance_no_longer_lists_it(
    here: World,
) -> None:
    async def one_token(out: Emitter) -> None:
        await out.text("x")

    here.one.script = one_token
    caller = Caller(here)
    await caller.call()
    ended = await caller.end()
    assert ended.error is not None
    assert ended.error.code == "connection_lost"
    assert await here.metric("talaria_gateway_calls_open") == 0


async def test_a_call_that_its_instance_lists_may_be_silent(here: World) -> None:
    async def a_long_silence(out: Emitter) -> None:
        await out.text("x")
        await asyncio.sleep(2 * FAST["silence_s"])
        await out.end()

    here.one.script = a_long_silence
    caller = Caller(here)
    await caller.call()
    assert (await caller.end()).reason is EndReason.FINISHED


async def test_a_failure_on_the_instance_is_told_once(here: World) -> None:
    async def fail(out: Emitter) -> None:
        error = ErrorInfo(code="model_failed", detail="out of memory")
        await out.end(None, reason=EndReason.FAILED, error=error)

    here.one.script = fail
    caller = Caller(here)
    await caller.call()
    await caller.end()
    await eventually(lambda: here.admission.settled, 2, "the call is settled")
    assert here.admission.settled[0].outcome == "model_failed"
    assert len(caller.of(Ended)) == 1
