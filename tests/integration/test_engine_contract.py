"""What every engine promises (engine/protocol.py): a common part, and one for each capability.

The fake engine runs in real time here; the torch engine runs the two seeded models on the CPU. One
engine of each kind serves the whole file: each test is a tenant of its own, so it starts cold.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from talaria_common.config import ModelEntry
from talaria_common.errors import Rejected
from talaria_common.testing import eventually
from talaria_common.wire import CallKey, ToolDelta
from talaria_instance import catalog
from talaria_instance.engine.fake import FakeConfig, FakeEngine
from talaria_instance.engine.protocol import (
    Capability,
    Engine,
    EngineCall,
    EngineRequest,
    KvBlock,
    ModelFacts,
    Quantum,
    StepReport,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 60.0
"""No wait of this file is longer."""
CONTEXT = 2048
FIRST, SECOND = "tiny-a", "tiny-b"


@dataclass
class Output:
    """What the sink heard of one call."""

    heard: list[str] = field(default_factory=list)
    text: str = ""
    tools: list[ToolDelta] = field(default_factory=list)
    restored_tokens: int = 0
    cached_tokens: int | None = None
    finish: str | None = None
    failed: str | None = None
    tokens: int | None = None

    @property
    def is_over(self) -> bool:
        return self.tokens is not None

    @property
    def arguments(self) -> str:
        return "".join(delta.arguments for delta in self.tools)


class RecordingSink:
    """Keeps what an engine says; may be called from any thread."""

    def __init__(self) -> None:
        self.outputs: defaultdict[CallKey, Output] = defaultdict(Output)
        self.saved: dict[bytes, KvBlock] = {}
        self.dropped: list[bytes] = []

    def restored(self, key: CallKey, seconds: float, tokens: int) -> None:
        self.outputs[key].heard.append("restored")
        self.outputs[key].restored_tokens = tokens

    def first_token(self, key: CallKey, cached_tokens: int) -> None:
        self.outputs[key].heard.append("first_token")
        self.outputs[key].cached_tokens = cached_tokens

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        self.outputs[key].heard.append("text")
        self.outputs[key].text += text
        self.outputs[key].tools += tool_calls

    def ended(self, key: CallKey, finish: str | None, failed: str | None, tokens: int) -> None:
        output = self.outputs[key]
        output.heard.append("ended")
        output.finish, output.failed, output.tokens = finish, failed, tokens

    def kv_saved(self, blocks: Sequence[KvBlock]) -> None:
        self.saved |= {block.prefix: block for block in blocks}

    def kv_dropped(self, prefixes: Sequence[bytes]) -> None:
        self.dropped += prefixes
        for prefix in prefixes:
            self.saved.pop(prefix, None)


class Rig:
    """An engine under test and the short ways to use it."""

    def __init__(self, engine: Engine, sink: RecordingSink, scope: str) -> None:
        self.engine = engine
        self.sink = sink
        self.scope = scope
        """Sets calls, tenants and sessions of one test apart."""
        self._calls: list[EngineCall] = []

    async def call(
        self, prompt: Any, *, model: str = FIRST, tenant: str = "", **extra: Any
    ) -> EngineCall:
        """Prepare a greedy chat call; `prompt` is a text or a list of messages."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        request = EngineRequest(
            key=CallKey(f"{self.scope}-{len(self._calls)}"),
            model=model,
            endpoint="chat",
            body={"model": model, "messages": messages, "temperature": 0} | extra,
            tenant=f"{self.scope} {tenant}",
            session=self.scope,
        )
        call = await self.engine.prepare(request)
        self._calls.append(call)
        return call

    async def run(
        self,
        *,
        model: str = FIRST,
        iterations: int = 10_000,
        prefill: int = 100_000,
        max_s: float = BOUND_S,
    ) -> StepReport:
        quantum = Quantum(
            model=model, max_decode_iterations=iterations, max_prefill_tokens=prefill, max_s=max_s
        )
        return await asyncio.wait_for(self.engine.run(quantum), BOUND_S)

    async def finish(self, *calls: EngineCall) -> list[StepReport]:
        """Run until all calls, of one model, are over."""
        reports = []
        deadline_s = time.monotonic() + BOUND_S
        while not all(self.output(call).is_over for call in calls):
            assert time.monotonic() < deadline_s, "the calls do not end"
            reports.append(await self.run(model=calls[0].model))
        return reports

    async def generate(self, prompt: Any, **extra: Any) -> Output:
        """The whole output of one call; its model must be active."""
        call = await self.call(prompt, **extra)
        self.engine.admit([call])
        await self.finish(call)
        return self.output(call)

    async def switch(self, model: str) -> None:
        await asyncio.wait_for(self.engine.activate(model), BOUND_S)

    async def clear(self) -> None:
        """Leave nothing of this test in the engine, and the first model active."""
        self.engine.wake()
        for call in self._calls:
            self.engine.abort(call.key)
        await self.switch(FIRST)
        assert (await self.run(max_s=5)).stop in ("idle", "finished")
        self.engine.drop_host_kv(list(self.saved))

    def output(self, call: EngineCall) -> Output:
        return self.sink.outputs[call.key]

    @property
    def saved(self) -> dict[bytes, KvBlock]:
        """Published blocks of this test."""
        return {p: b for p, b in self.sink.saved.items() if b.session == self.scope}

    def block_tokens(self, model: str = FIRST) -> int:
        return self.facts(model).block_tokens

    def facts(self, model: str = FIRST) -> ModelFacts:
        return next(m for m in self.engine.facts().models if m.model == model)

    def aligned(self, tokens: int, model: str = FIRST) -> int:
        """Tokens in the full blocks of a prompt whose last token is always computed."""
        return (tokens - 1) // self.block_tokens(model) * self.block_tokens(model)


def _fake(sink: RecordingSink, keep_finished_kv: bool) -> Engine:
    config = FakeConfig(
        prefill_fixed_s=0.001,
        prefill_token_s=0.00002,
        decode_step_s=0.001,
        max_model_len=CONTEXT,
        keep_finished_kv=keep_finished_kv,
    )
    entries = [ModelEntry(id=i, engine="fake", weight_bytes=10_000_000) for i in (FIRST, SECOND)]
    return FakeEngine(entries, config, sink)


def _torch(sink: RecordingSink, keep_finished_kv: bool) -> Engine:
    from talaria_instance.engine.torch.config import TorchConfig
    from talaria_instance.engine.torch.engine import TorchEngine

    entries = [
        msgspec.structs.replace(entry, max_model_len=CONTEXT)
        for entry in catalog.prepare_default(catalog.default_cache(), print)
        if entry.id in (FIRST, SECOND)
    ]
    config = TorchConfig(
        arena_bytes=400_000_000, host_kv_bytes=200_000_000, keep_finished_kv=keep_finished_kv
    )
    return TorchEngine(entries, config, sink)


ENGINES: dict[str, Callable[[RecordingSink, bool], Engine]] = {"fake": _fake, "torch": _torch}
KINDS = ["fake", pytest.param("torch", marks=pytest.mark.real_model)]


@asynccontextmanager
async def open_rig(kind: str, *, keep_finished_kv: bool = True) -> AsyncIterator[Rig]:
    """A rig on an engine of its own."""
    sink = RecordingSink()
    engine = ENGINES[kind](sink, keep_finished_kv)
    try:
        await asyncio.wait_for(engine.start(), BOUND_S)
        rig = Rig(engine, sink, "own")
        await rig.switch(FIRST)
        yield rig
    finally:
        await asyncio.wait_for(engine.close(), BOUND_S)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "torch":
        pytest.importorskip("torch", reason="the torch extra is not installed")
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(kind: str) -> AsyncIterator[Rig]:
    async with open_rig(kind) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared: Rig, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig(shared.engine, shared.sink, request.node.name)
    yield rig
    await rig.clear()


def needs(rig: Rig, capability: Capability) -> None:
    if capability not in rig.engine.capabilities:
        pytest.skip(f"the engine does not claim {capability}")


def story(n: int = 0, words: int = 60) -> str:
    return f"Story {n}: " + "once upon a time " * (words // 4)


# --- common: output -----------------------------------------------------------------------------


async def test_a_call_is_told_in_order_and_ends_once(rig: Rig) -> None:
    output = await rig.generate(story(), max_tokens=12, ignore_eos=True)
    assert output.heard[0] == "first_token"
    assert set(output.heard[1:-1]) == {"text"}
    assert output.heard[-1] == "ended"
    assert (output.finish, output.failed, output.tokens) == ("length", None, 12)
    assert output.text


async def test_ignore_eos_runs_to_max_tokens(rig: Rig) -> None:
    output = await rig.generate("Hi.", max_tokens=100, ignore_eos=True)
    assert (output.finish, output.tokens) == ("length", 100)


async def test_min_tokens_are_generated(rig: Rig) -> None:
    output = await rig.generate("Hi.", min_tokens=80, max_tokens=90)
    assert output.tokens is not None
    assert 80 <= output.tokens <= 90


async def test_a_greedy_prompt_has_one_answer_and_another_prompt_another(rig: Rig) -> None:
    first, again, other = [
        await rig.generate(story(n), max_tokens=16, ignore_eos=True) for n in (1, 1, 2)
    ]
    assert first.text == again.text != other.text


async def test_a_stop_string_ends_the_text_before_it(rig: Rig) -> None:
    whole = (await rig.generate(story(), max_tokens=40, ignore_eos=True)).text
    stop = whole[len(whole) // 2 :][:5]
    output = await rig.generate(story(), max_tokens=40, ignore_eos=True, stop=[stop, "§§"])
    assert (output.text, output.finish) == (whole[: whole.index(stop)], "stop")


async def test_calls_together_say_what_they_say_alone(rig: Rig) -> None:
    alone = [
        (await rig.generate(story(n), max_tokens=10 + n, ignore_eos=True)).text for n in range(4)
    ]
    calls = [await rig.call(story(n), max_tokens=10 + n, ignore_eos=True) for n in range(4)]
    rig.engine.admit(calls)
    await rig.finish(*calls)
    assert [rig.output(call).text for call in calls] == alone


# --- common: prefix reuse -----------------------------------------------------------------------


async def test_a_repeated_prompt_is_cached_up_to_block_alignment(rig: Rig) -> None:
    first = await rig.generate(story(), max_tokens=2)
    assert first.cached_tokens == 0
    call = await rig.call(story(), max_tokens=2)
    assert rig.engine.locality(call).device_tokens == rig.aligned(call.prompt_tokens) > 0
    rig.engine.admit([call])
    reports = await rig.finish(call)
    assert rig.output(call).cached_tokens == rig.aligned(call.prompt_tokens)
    computed = sum(report.prefill_tokens for report in reports)
    assert computed == call.prompt_tokens - rig.aligned(call.prompt_tokens)


async def test_a_continuation_reuses_its_whole_earlier_prompt(rig: Rig) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": story()}]
    earlier_tokens = 0
    for turn in range(3):
        call = await rig.call(messages, max_tokens=20)
        rig.engine.admit([call])
        await rig.finish(call)
        cached = rig.output(call).cached_tokens
        assert cached is not None
        assert cached >= earlier_tokens // rig.block_tokens() * rig.block_tokens()
        earlier_tokens = call.prompt_tokens
        reply = {"role": "assistant", "content": rig.output(call).text}
        messages = [*messages, reply, {"role": "user", "content": f"Go on, {turn}."}]


async def test_another_tenant_reuses_nothing(rig: Rig) -> None:
    await rig.generate(story(), max_tokens=2, tenant="one")
    call = await rig.call(story(), max_tokens=2, tenant="two")
    locality = rig.engine.locality(call)
    assert (locality.device_tokens, locality.host_tokens) == (0, 0)


# --- common: limits -----------------------------------------------------------------------------


async def test_a_prompt_over_the_context_is_rejected_with_both_counts(rig: Rig) -> None:
    with pytest.raises(Rejected) as caught:
        await rig.call("word " * (2 * rig.facts().max_model_len))
    assert caught.value.code == "context_length_exceeded"
    numbers = [int(s) for s in caught.value.detail.replace(",", " ").split() if s.isdigit()]
    assert numbers[0] == rig.facts().max_model_len < numbers[1]


async def test_max_tokens_is_cut_to_what_the_context_leaves(rig: Rig) -> None:
    limit = rig.facts().max_model_len
    extras: list[dict[str, Any]] = [{"max_tokens": limit}, {}]
    for extra in extras:
        call = await rig.call("Hi.", **extra)
        assert call.max_tokens == limit - call.prompt_tokens
        assert call.blocks_needed <= rig.facts().blocks_max


async def test_an_unknown_model_is_rejected(rig: Rig) -> None:
    with pytest.raises(Rejected) as caught:
        await rig.call("Hi.", model="nobody")
    assert caught.value.code == "unknown_model"


# --- common: quanta -----------------------------------------------------------------------------


async def test_a_run_without_calls_is_idle(rig: Rig) -> None:
    report = await rig.run(max_s=5)
    assert (report.stop, report.iterations, report.calls) == ("idle", 0, ())


async def test_a_finished_call_ends_the_run_and_is_in_its_report(rig: Rig) -> None:
    short = await rig.call(story(1), max_tokens=4, ignore_eos=True)
    long = await rig.call(story(2), max_tokens=60, ignore_eos=True)
    rig.engine.admit([short, long])
    reports = await rig.finish(short)
    assert reports[-1].stop == "finished"
    (progress,) = [p for p in reports[-1].calls if p.finish]
    assert (progress.key, progress.finish) == (short.key, "length")
    assert not rig.output(long).is_over
    await rig.finish(long)


async def test_seconds_of_a_report_hold_its_parts(rig: Rig) -> None:
    call = await rig.call(story(), max_tokens=8, ignore_eos=True)
    rig.engine.admit([call])
    before_s = time.monotonic()
    (report,) = await rig.finish(call)
    wall_s = time.monotonic() - before_s
    parts_s = report.prefill_s + report.decode_s + report.restore_s
    assert 0 < parts_s <= report.seconds + 1e-6
    assert report.seconds <= wall_s + 1e-3
    assert report.prefill_s > 0
    assert report.decode_s > 0


async def test_no_iteration_starts_after_max_s(rig: Rig) -> None:
    call = await rig.call(story(), max_tokens=1000, ignore_eos=True)
    rig.engine.admit([call])
    await rig.run(iterations=1)
    report = await rig.run(max_s=0.1)
    assert report.stop == "bound"
    assert report.iterations >= 1
    slowest_s = 0.1 + 5 * report.seconds / report.iterations
    assert 0.1 <= report.seconds < slowest_s
    assert rig.engine.abort(call.key)


async def test_wake_ends_a_run_at_its_next_boundary(rig: Rig) -> None:
    call = await rig.call(story(), max_tokens=1500, ignore_eos=True)
    rig.engine.admit([call])
    running = asyncio.create_task(rig.run())
    await eventually(lambda: len(rig.output(call).heard) > 3, BOUND_S, "the call decodes")
    rig.engine.wake()
    report = await asyncio.wait_for(running, 5)
    assert report.stop == "woken"
    assert not rig.output(call).is_over
    assert rig.engine.abort(call.key)


async def test_facts_agree_with_what_was_done(rig: Rig) -> None:
    before = rig.engine.facts()
    assert before.active == FIRST
    assert rig.facts(FIRST).residency == "active"
    assert rig.facts(FIRST).switch_s == 0
    assert rig.facts(FIRST).max_model_len == CONTEXT
    call = await rig.call(story(), max_tokens=50, ignore_eos=True)
    rig.engine.admit([call])
    await rig.run(iterations=2)
    during = rig.engine.facts()
    assert 0 <= during.blocks_free < before.blocks_free <= during.blocks_total
    await rig.finish(call)
    assert rig.engine.facts().blocks_free == before.blocks_free
    assert min(rig.facts().prefill_token_s, rig.facts().decode_step_s) > 0


# --- common: ends -------------------------------------------------------------------------------


async def test_an_unknown_call_cannot_be_aborted(rig: Rig) -> None:
    assert rig.engine.abort(CallKey("nobody")) is False
    output = await rig.generate("Hi.", max_tokens=1)
    assert output.is_over


async def test_a_queued_call_is_aborted_before_it_costs_anything(rig: Rig) -> None:
    call = await rig.call(story(), max_tokens=10)
    rig.engine.admit([call])
    assert rig.engine.abort(call.key)
    await rig.run(max_s=1)
    output = rig.output(call)
    assert (output.heard, output.finish, output.failed) == (["ended"], None, None)
    assert output.tokens == 0


async def test_a_decoding_call_is_aborted_at_a_boundary_and_others_go_on(rig: Rig) -> None:
    leaving = await rig.call(story(1), max_tokens=1500, ignore_eos=True)
    staying = await rig.call(story(2), max_tokens=40, ignore_eos=True)
    rig.engine.admit([leaving, staying])
    running = asyncio.create_task(rig.run())
    await eventually(lambda: len(rig.output(leaving).heard) > 2, BOUND_S, "it decodes")
    assert rig.engine.abort(leaving.key)
    report = await asyncio.wait_for(running, BOUND_S)
    assert report.stop == "finished"
    assert [p.key for p in report.calls if p.is_aborted] == [leaving.key]
    await rig.finish(staying)
    output = rig.output(leaving)
    assert (output.heard[-1], output.heard.count("ended")) == ("ended", 1)
    assert (output.finish, output.failed) == (None, None)
    assert rig.output(staying).tokens == 40
    assert rig.engine.abort(leaving.key) is False


async def test_close_fails_what_runs_and_what_waits_and_may_be_repeated(kind: str) -> None:
    async with open_rig(kind) as rig:
        call = await rig.call(story(1), max_tokens=1500, ignore_eos=True)
        paused = await rig.call(story(2), model=SECOND, max_tokens=1500, ignore_eos=True)
        rig.engine.admit([call, paused])
        running = asyncio.create_task(rig.run())
        await eventually(lambda: rig.output(call).heard, BOUND_S, "the call runs")
        for _ in range(2):
            await asyncio.wait_for(rig.engine.close(), BOUND_S)
        await asyncio.wait([running], timeout=5)
        assert running.done()
        for over in (call, paused):
            output = rig.output(over)
            assert output.heard.count("ended") == 1
            assert output.finish is None
            assert output.failed


# --- exact_quanta -------------------------------------------------------------------------------


async def test_a_run_stops_after_exactly_the_asked_iterations(rig: Rig) -> None:
    needs(rig, "exact_quanta")
    call = await rig.call(story(), max_tokens=60, ignore_eos=True)
    rig.engine.admit([call])
    reports = [await rig.run(iterations=n) for n in (0, 1, 7, 3)]
    assert [(r.stop, r.iterations) for r in reports] == [("bound", n) for n in (0, 1, 7, 3)]
    assert [r.decode_tokens for r in reports] == [0, 1, 7, 3]
    await rig.finish(call)
    assert rig.output(call).tokens == 60


async def test_a_prefill_cut_by_its_bound_goes_on_in_the_next_run(rig: Rig) -> None:
    needs(rig, "exact_quanta")
    whole = await rig.generate(story(7), max_tokens=12, ignore_eos=True, tenant="whole")
    call = await rig.call(story(7), max_tokens=12, ignore_eos=True, tenant="cut")
    rig.engine.admit([call])
    left = call.prompt_tokens
    while left > 24:
        report = await rig.run(iterations=0, prefill=24)
        left -= 24
        (progress,) = report.calls
        assert (report.stop, report.prefill_tokens) == ("bound", 24)
        assert (progress.prefilled_tokens, progress.remaining_prefill) == (24, left)
        assert not rig.output(call).heard
    await rig.finish(call)
    assert rig.output(call).text == whole.text


async def test_a_call_is_aborted_in_the_middle_of_its_prefill(rig: Rig) -> None:
    needs(rig, "exact_quanta")
    free = rig.engine.facts().blocks_free
    call = await rig.call(story(), max_tokens=12)
    rig.engine.admit([call])
    await rig.run(iterations=0, prefill=24)
    assert rig.engine.abort(call.key)
    await rig.run(max_s=1)
    assert rig.output(call).heard == ["ended"]
    assert rig.engine.facts().blocks_free == free


# --- several_models -----------------------------------------------------------------------------


async def test_a_switch_is_recorded_and_changes_the_facts(rig: Rig) -> None:
    needs(rig, "several_models")
    assert rig.facts(SECOND).switch_s > 0
    record = await rig.engine.activate(SECOND)
    assert (record.model, record.path) == (SECOND, "h2d")
    parts_s = record.save_s + record.weights_s + record.shell_s + record.graphs_s + record.publish_s
    assert parts_s == pytest.approx(record.seconds, abs=0.05)
    assert record.moved_bytes > 0
    assert rig.engine.facts().active == SECOND
    assert rig.facts(FIRST).residency != "active"
    again = await rig.engine.activate(SECOND)
    assert (again.path, again.moved_bytes) == ("none", 0)


async def test_models_answer_for_themselves(rig: Rig) -> None:
    needs(rig, "several_models")
    first = await rig.generate(story(), max_tokens=16, ignore_eos=True)
    await rig.switch(SECOND)
    second = await rig.generate(story(), model=SECOND, max_tokens=16, ignore_eos=True)
    assert second.cached_tokens == 0
    assert first.text != second.text
    await rig.switch(FIRST)
    again = await rig.generate(story(), max_tokens=16, ignore_eos=True)
    assert again.text == first.text


async def test_a_paused_call_goes_on_as_if_nothing_had_happened(rig: Rig) -> None:
    needs(rig, "several_models")
    plain = await rig.generate(story(5), max_tokens=40, ignore_eos=True, tenant="plain")
    call = await rig.call(story(5), max_tokens=40, ignore_eos=True, tenant="paused")
    half = await rig.call(story(6), max_tokens=4, ignore_eos=True, tenant="paused")
    rig.engine.admit([call])
    await rig.run(iterations=9)
    rig.engine.admit([half])
    await rig.run(iterations=0, prefill=24)
    await rig.switch(SECOND)
    other = await rig.generate(story(5), model=SECOND, max_tokens=8)
    assert other.is_over
    assert not rig.output(call).is_over
    await rig.switch(FIRST)
    await rig.finish(call, half)
    assert rig.output(call).text == plain.text
    assert rig.output(call).heard.count("first_token") == 1
    assert rig.output(half).tokens == 4


async def test_a_paused_call_is_aborted_at_once(rig: Rig) -> None:
    needs(rig, "several_models")
    call = await rig.call(story(), max_tokens=40, ignore_eos=True)
    rig.engine.admit([call])
    await rig.run(iterations=3)
    await rig.switch(SECOND)
    assert rig.engine.abort(call.key)
    output = rig.output(call)
    assert (output.is_over, output.finish, output.failed) == (True, None, None)
    await rig.switch(FIRST)
    assert (await rig.run(max_s=1)).stop == "idle"


# --- host_kv ------------------------------------------------------------------------------------


async def _prompt_and_back(rig: Rig) -> EngineCall:
    """Finish a call, wait for its host copy, switch away and back; the same call, prepared anew."""
    call = await rig.call(story(3, 120), max_tokens=6, ignore_eos=True)
    rig.engine.admit([call])
    await rig.finish(call)
    aligned = rig.aligned(call.prompt_tokens)
    if "host_kv" in rig.engine.capabilities:
        await eventually(
            lambda: any(b.tokens >= aligned for b in rig.saved.values()),
            5,
            "the host copy is published",
        )
    await rig.switch(SECOND)
    await rig.switch(FIRST)
    return await rig.call(story(3, 120), max_tokens=6, ignore_eos=True)


async def test_kv_of_a_finished_call_is_restored_after_a_switch(rig: Rig) -> None:
    needs(rig, "host_kv")
    before = await rig.generate(story(3, 120), max_tokens=6, ignore_eos=True, tenant="before")
    call = await _prompt_and_back(rig)
    aligned = rig.aligned(call.prompt_tokens)
    locality = rig.engine.locality(call)
    assert (locality.device_tokens + locality.host_tokens) == aligned
    assert locality.host_tokens > 0
    rig.engine.admit([call])
    reports = await rig.finish(call)
    output = rig.output(call)
    assert output.heard[:2] == ["restored", "first_token"]
    assert (output.restored_tokens, output.cached_tokens) == (locality.host_tokens, aligned)
    assert sum(r.restored_tokens for r in reports) == locality.host_tokens
    assert output.text == before.text


async def test_published_blocks_form_chains_within_the_prompt(rig: Rig) -> None:
    needs(rig, "host_kv")
    call = await _prompt_and_back(rig)
    blocks = rig.saved
    assert len(blocks) >= rig.aligned(call.prompt_tokens) // rig.block_tokens()
    for block in blocks.values():
        parent = blocks.get(block.parent)
        assert (parent.tokens if parent else 0) + rig.block_tokens() == block.tokens
        assert block.model == FIRST
        assert block.nbytes > 0
    assert rig.engine.facts().host_kv_bytes >= sum(b.nbytes for b in blocks.values())


async def test_dropped_host_kv_is_gone_and_said_to_be(rig: Rig) -> None:
    needs(rig, "host_kv")
    call = await _prompt_and_back(rig)
    prefixes = list(rig.saved)
    rig.engine.drop_host_kv([*prefixes, b"never seen"])
    await eventually(lambda: set(rig.sink.dropped) >= set(prefixes), 5, "all are dropped")
    assert rig.engine.locality(call).host_tokens == 0
    rig.engine.admit([call])
    await rig.finish(call)
    assert rig.output(call).cached_tokens == 0


async def test_dropping_a_block_leaves_its_parents(rig: Rig) -> None:
    needs(rig, "host_kv")
    call = await _prompt_and_back(rig)
    cut = next(b for b in rig.saved.values() if b.tokens == 2 * rig.block_tokens())
    rig.engine.drop_host_kv([cut.prefix])
    await eventually(lambda: cut.prefix in rig.sink.dropped, 5, "it is dropped")
    assert rig.engine.locality(call).host_tokens == rig.block_tokens()


async def test_without_finished_kv_a_switch_loses_the_prefix(kind: str) -> None:
    async with open_rig(kind, keep_finished_kv=False) as rig:
        needs(rig, "several_models")
        call = await rig.call(story(3, 120), max_tokens=6)
        rig.engine.admit([call])
        await rig.finish(call)
        assert rig.engine.locality(call).device_tokens > 0
        await rig.switch(SECOND)
        await rig.switch(FIRST)
        locality = rig.engine.locality(call)
        assert (locality.device_tokens, locality.host_tokens) == (0, 0)
        output = await rig.generate(story(3, 120), max_tokens=6)
        assert (output.cached_tokens, output.restored_tokens) == (0, 0)
        assert not rig.saved


# --- structured_output --------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["grün", "blau"]}, "size": {"type": "integer"}},
    "required": ["colour"],
    "additionalProperties": False,
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "enum": ["ls -la", "pwd"]}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


async def test_text_fits_the_schema_of_response_format(rig: Rig) -> None:
    needs(rig, "structured_output")
    output = await rig.generate("Colour?", response_format=response_format(SCHEMA), max_tokens=200)
    assert json.loads(output.text)["colour"] in ("grün", "blau")
    assert output.finish == "stop"


async def test_a_schema_can_spell_any_text(rig: Rig) -> None:
    needs(rig, "structured_output")
    text = "多字节字符必须完整。한국어도 그대로."
    schema: dict[str, Any] = {"type": "object", "properties": {"v": {"enum": [text]}}}
    schema |= {"required": ["v"], "additionalProperties": False}
    output = await rig.generate("Go.", response_format=response_format(schema), max_tokens=200)
    assert json.loads(output.text) == {"v": text}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "bash"}}], ids=["any", "named"]
)
async def test_a_forced_tool_call_comes_in_pieces_that_fit_the_tool(rig: Rig, choice: Any) -> None:
    needs(rig, "structured_output")
    output = await rig.generate("List.", tools=[BASH], tool_choice=choice, max_tokens=80)
    first, *rest = output.tools
    assert first.id
    assert first.name == "bash"
    assert rest
    assert not any(delta.id or delta.name for delta in rest)
    assert json.loads(output.arguments)["command"] in ("ls -la", "pwd")
    assert (output.finish, output.text) == ("tool_calls", "")


async def test_a_tool_call_cut_by_max_tokens_says_length(rig: Rig) -> None:
    needs(rig, "structured_output")
    output = await rig.generate("List.", tools=[BASH], tool_choice="required", max_tokens=3)
    assert (output.finish, output.tokens) == ("length", 3)


BAD_BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": (
        {
            "response_format": response_format(
                {"type": "object", "properties": {"a": {"type": "?"}}}
            )
        },
        "response_format",
    ),
    "tool not offered": (
        {"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
    ),
}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_what_no_output_can_fit_is_rejected(rig: Rig, case: str) -> None:
    needs(rig, "structured_output")
    extra, param = BAD_BODIES[case]
    with pytest.raises(Rejected) as caught:
        await rig.call("Hi.", max_tokens=4, **extra)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)
    assert (await rig.generate("Hi.", max_tokens=1)).tokens == 1
