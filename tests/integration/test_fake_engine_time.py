"""The fake engine in virtual time: what things cost, what fits, and many calls at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from talaria_common.clock import VirtualClock
from talaria_common.config import ModelEntry
from talaria_common.errors import InvariantBroken
from talaria_common.wire import CallKey
from talaria_instance.engine.fake import FakeConfig, FakeEngine
from talaria_instance.engine.protocol import EngineCall, EngineRequest, Quantum, StepReport


class Sink:
    """Keeps the last word on each call."""

    def __init__(self) -> None:
        self.ended_by: dict[CallKey, tuple[str | None, str | None, int]] = {}
        self.cached: dict[CallKey, int] = {}
        self.dropped: list[bytes] = []

    def restored(self, key: CallKey, seconds: float, tokens: int) -> None:
        pass

    def first_token(self, key: CallKey, cached_tokens: int) -> None:
        self.cached[key] = cached_tokens

    def text(self, key: CallKey, text: str, tool_calls: Any, tokens: int) -> None:
        assert key not in self.ended_by, "text after the end"

    def ended(self, key: CallKey, finish: str | None, failed: str | None, tokens: int) -> None:
        assert key not in self.ended_by, "a call ended twice"
        self.ended_by[key] = (finish, failed, tokens)

    def kv_saved(self, blocks: Any) -> None:
        pass

    def kv_dropped(self, prefixes: Any) -> None:
        self.dropped += prefixes


class Bench:
    """An engine whose time passes when it sleeps."""

    def __init__(self, **config: Any) -> None:
        self.clock = VirtualClock()
        self.sink = Sink()
        models = [ModelEntry(id="m"), ModelEntry(id="n", weight_bytes=2_000_000_000)]
        self.engine = FakeEngine(
            models, FakeConfig(**config), self.sink, self.clock, sleep=self._sleep
        )

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    async def call(
        self, name: str, text: str = "Hi.", model: str = "m", **extra: Any
    ) -> EngineCall:
        body = {"messages": [{"role": "user", "content": text}]} | extra
        request = EngineRequest(key=CallKey(name), model=model, endpoint="chat", body=body)
        return await self.engine.prepare(request)

    async def run(self, model: str = "m", iterations: int = 10_000) -> StepReport:
        return await self.engine.run(
            Quantum(
                model=model, max_decode_iterations=iterations, max_prefill_tokens=10**6, max_s=1e6
            )
        )

    async def finish(self, *calls: EngineCall) -> None:
        for _ in range(10_000):
            if all(call.key in self.sink.ended_by for call in calls):
                return
            await self.run(calls[0].model)
        raise AssertionError("the calls do not end")


async def test_time_is_what_the_config_says() -> None:
    bench = Bench()
    await bench.engine.activate("m")
    assert bench.clock.now_s() == pytest.approx(0.001 + 0.5 / 10)
    call = await bench.call("c", "word " * 20, max_tokens=11, ignore_eos=True)
    bench.engine.admit([call])
    report = await bench.run()
    assert report.prefill_s == pytest.approx(0.005 + call.prompt_tokens * 0.0002)
    assert report.decode_s == pytest.approx(10 * 0.010)
    assert report.seconds == pytest.approx(report.prefill_s + report.decode_s)


async def test_a_batch_is_slower_by_a_small_share_per_sequence() -> None:
    bench = Bench()
    await bench.engine.activate("m")
    calls = [await bench.call(f"c{n}", f"{n}", max_tokens=50, ignore_eos=True) for n in range(11)]
    bench.engine.admit(calls)
    report = await bench.run(iterations=10)
    assert report.iterations == 10
    assert report.decode_tokens == 110
    assert report.decode_s == pytest.approx(10 * 0.010 * 1.1)


async def test_a_larger_model_takes_longer_to_switch_to() -> None:
    bench = Bench()
    small = await bench.engine.activate("m")
    large = await bench.engine.activate("n")
    assert large.seconds == pytest.approx(0.001 + 2 / 10)
    assert large.seconds > small.seconds
    facts = {m.model: m for m in bench.engine.facts().models}
    assert facts["m"].switch_s == pytest.approx(small.seconds)


async def test_pausing_costs_a_save_and_resuming_a_restore() -> None:
    bench = Bench()
    await bench.engine.activate("m")
    call = await bench.call("c", "word " * 400, max_tokens=20, ignore_eos=True)
    bench.engine.admit([call])
    await bench.run(iterations=4)
    record = await bench.engine.activate("n")
    held_tokens = call.prompt_tokens + 4
    assert record.save_s == pytest.approx(held_tokens * 1024 / 10e9)
    await bench.engine.activate("m")
    report = await bench.run()
    assert report.restore_s == pytest.approx(held_tokens * 0.00001)
    assert bench.sink.ended_by[call.key] == ("length", None, 20)


async def test_calls_that_do_not_fit_wait_for_blocks_in_order() -> None:
    bench = Bench(blocks_total=8, max_model_len=128)
    await bench.engine.activate("m")
    large = [await bench.call(f"l{n}", f"{n}", max_tokens=70, ignore_eos=True) for n in range(2)]
    small = await bench.call("s", max_tokens=2, ignore_eos=True)
    assert [call.blocks_needed for call in (*large, small)] == [5, 5, 1]
    bench.engine.admit([*large, small])
    await bench.run(iterations=3)
    assert bench.engine.facts().blocks_free == 3
    assert small.key not in bench.sink.cached, "the small call overtook the one before it"
    await bench.finish(*large, small)
    assert bench.engine.facts().blocks_free == 8


async def test_a_full_device_evicts_idle_prefixes() -> None:
    bench = Bench(blocks_total=40, max_model_len=640, keep_finished_kv=False)
    await bench.engine.activate("m")
    for n in range(4):
        call = await bench.call(f"c{n}", f"{n} " + "word " * 300, max_tokens=4)
        bench.engine.admit([call])
        await bench.finish(call)
    first = await bench.call("again", "0 " + "word " * 300, max_tokens=4)
    last = await bench.call("last", "3 " + "word " * 300, max_tokens=4)
    assert bench.engine.locality(first).device_tokens == 0
    assert bench.engine.locality(last).device_tokens > 300


async def test_a_full_host_pool_says_what_it_dropped() -> None:
    bench = Bench(host_kv_bytes=30 * 16 * 1024)
    await bench.engine.activate("m")
    for n in range(3):
        call = await bench.call(f"c{n}", f"{n} " + "word " * 300, max_tokens=4)
        bench.engine.admit([call])
        await bench.finish(call)
    assert bench.sink.dropped
    assert bench.engine.facts().host_kv_bytes <= 30 * 16 * 1024


async def test_a_marked_prompt_fails_in_mid_stream() -> None:
    bench = Bench(fail_on_text="FAULT")
    await bench.engine.activate("m")
    bad, good = await bench.call("bad", "a FAULT here"), await bench.call("good", "none here")
    bench.engine.admit([bad, good])
    await bench.finish(bad, good)
    assert bench.sink.ended_by[bad.key] == (None, "a scripted fault", 3)
    assert bench.sink.ended_by[good.key][0] == "stop"
    assert bench.engine.facts().blocks_free == bench.engine.facts().blocks_total


async def test_misuse_is_an_invariant_broken() -> None:
    bench = Bench()
    await bench.engine.activate("m")
    with pytest.raises(InvariantBroken):
        await bench.run("n")
    call = await bench.call("c")
    bench.engine.admit([call])
    with pytest.raises(InvariantBroken):
        bench.engine.admit([call])


async def test_two_hundred_calls_with_aborts_and_switches_all_end_once() -> None:
    bench = Bench(blocks_total=600)
    calls = [
        await bench.call(
            f"c{n}",
            f"Story {n % 20}: " + "once upon " * (n % 50),
            model="mn"[n % 2],
            max_tokens=5 + n % 40,
            ignore_eos=True,
        )
        for n in range(200)
    ]
    for n, call in enumerate(calls):
        if n % 10 == 0:
            model = "mn"[n // 10 % 2]
            await bench.engine.activate(model)
            await bench.run(model, iterations=2)
        bench.engine.admit([call])
        if n % 7 == 0:
            key = calls[n // 2].key
            is_running = key not in bench.sink.ended_by
            assert bench.engine.abort(key) == is_running
    for turn in range(200):
        model = "mn"[turn % 2]
        await bench.engine.activate(model)
        for _ in range(3):
            await bench.run(model, iterations=10)
    assert bench.sink.ended_by.keys() == {call.key for call in calls}
    outcomes = {call.key: bench.sink.ended_by[call.key] for call in calls}
    for call in calls:
        finish, failed, tokens = outcomes[call.key]
        assert failed is None
        assert finish is None or (finish, tokens) == ("length", call.max_tokens)
    assert sum(finish is None for finish, _, _ in outcomes.values()) < 40
    assert bench.engine.facts().blocks_free == 600
