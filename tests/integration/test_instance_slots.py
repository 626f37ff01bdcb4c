"""The instance service with two models: slots, session-prefill, host KV, snapshots, faults."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from talaria_common import subjects
from talaria_common.bus import Msg, NoResponders
from talaria_common.config import ConfigError, ModelEntry
from talaria_common.policies import policy_set
from talaria_common.testing import OtlpSink, eventually
from talaria_common.wire import (
    KV_EVENT,
    SNAPSHOT,
    Accepted,
    CallKey,
    EndReason,
    EvictKv,
    KvDropped,
    KvSaved,
    Refused,
    SnapshotRequest,
    encode,
)
from talaria_instance.engine.fake import FakeEngine
from talaria_instance.events import RECORDED, Admit, Interrupt, SlotClosed, TimingChanged
from talaria_instance.main import build_engine, engine_settings
from talaria_instance.rounds import SchedulerConfig
from talaria_instance.scheduler import Scheduler

from .instance_peers import INSTANCE, Peer, World, world

TOKENS = 40
LONG = {"max_tokens": 2000, "ignore_eos": True}
SHORT = {"max_tokens": TOKENS, "ignore_eos": True}


async def a_turn(
    peer: Peer, call_id: str, history: list[dict[str, Any]], model: str = "m-a"
) -> list[dict[str, Any]]:
    """One call of a session and its reply; the history with both."""
    history = [*history, {"role": "user", "content": f"turn {call_id} " * 20}]
    await peer.run(
        call_id,
        model=model,
        session=f"s-{model}",
        messages=history,
        body=SHORT,
        is_continuation=len(history) > 1,
    )
    await peer.end_of(call_id)
    return [*history, {"role": "assistant", "content": peer.heard[CallKey(call_id)].text}]


# --- slots --------------------------------------------------------------------------------------


async def test_two_models_take_turns_and_pause_each_other(tmp_path: Path) -> None:
    async with world(tmp_path, t_ttft_s=0.6, slot_min_s=0.1) as it:
        await it.peer.run("a1", model="m-a", body={"max_tokens": 300, "ignore_eos": True})
        await it.peer.run("b1", model="m-b", body={"max_tokens": 300, "ignore_eos": True})
        ends = [await it.peer.end_of("a1"), await it.peer.end_of("b1")]
        assert all(e.usage.completion_tokens == 300 for e in ends)
        assert all(e.parts.switch_s > 0 for e in ends)
        assert any(e.parts.queue_s > 0.1 for e in ends)
        assert any(slot.paused for slot in it.peer.slots)
        for slot in it.peer.slots:
            total_s = slot.switch_s + slot.active_s + slot.idle_s
            assert total_s == pytest.approx(
                slot.switch_s + sum(s for _, s in slot.phases), abs=1e-6
            )


async def test_a_continuation_enters_the_open_slot_of_its_model(tmp_path: Path) -> None:
    async with world(tmp_path, t_ttft_s=8.0) as it:
        history = await a_turn(it.peer, "a1", [])
        await it.peer.run("hold", model="m-a", body=LONG)
        await it.peer.tokens_of("hold")
        await it.peer.run("b1", model="m-b", body=SHORT)
        await a_turn(it.peer, "a2", history)
        assert it.metric("talaria_instance_admitted_total", phase="SP") == 1
        assert it.peer.heard[CallKey("b1")].tokens == 0


async def test_without_session_prefill_it_waits_for_the_next_slot(tmp_path: Path) -> None:
    async with world(tmp_path, policy="no-sp", t_ttft_s=2.0) as it:
        history = await a_turn(it.peer, "a1", [])
        await it.peer.run("hold", model="m-a", body=LONG)
        await it.peer.tokens_of("hold")
        await it.peer.run("b1", model="m-b", body=SHORT)
        await a_turn(it.peer, "a2", history)
        assert it.peer.heard[CallKey("b1")].tokens > 0
        assert not it.metric("talaria_instance_admitted_total", phase="SP") >= 1


@pytest.mark.parametrize(("policy", "is_kept"), [("talaria", True), ("no-hkvr", False)])
async def test_host_kv_survives_a_switch_if_the_policy_says_so(
    tmp_path: Path, policy: str, is_kept: bool
) -> None:
    async with world(tmp_path, policy=policy) as it:
        history = await a_turn(it.peer, "a1", [])
        await a_turn(it.peer, "b1", [], "m-b")
        await a_turn(it.peer, "a2", history)
        ended = await it.peer.end_of("a2")
        assert (ended.usage.cached_tokens > 0) is is_kept
        assert (ended.parts.restore_s > 0) is is_kept


async def test_a_prefix_on_the_device_is_not_computed_again(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        history = await a_turn(it.peer, "a1", [])
        before = (await it.peer.end_of("a1")).usage
        await a_turn(it.peer, "a2", history)
        usage = (await it.peer.end_of("a2")).usage
        assert usage.cached_tokens >= before.prompt_tokens - 4
        assert (await it.peer.end_of("a2")).parts.restore_s == 0


# --- snapshots ----------------------------------------------------------------------------------


async def test_snapshots_are_the_heartbeat(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await eventually(lambda: len(it.peer.snapshots) >= 3, within_s=2.5, why="a heartbeat")
        versions = [s.version for s in it.peer.snapshots]
        assert versions == sorted(set(versions))
        snapshot = it.peer.snapshot
        assert snapshot.is_ready
        assert [m.model for m in snapshot.models] == ["m-a", "m-b"]
        assert all(m.blocks_max and m.max_model_len and m.switch_s for m in snapshot.models)


async def test_a_snapshot_shows_what_runs_and_what_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        running = await it.snapshot(lambda s: s.models[0].calls_running == 1, "a running call")
        assert [g.grant.key for g in running.live_grants] == [CallKey("c1")]
        assert running.slot is not None
        assert running.slot.model == "m-a"
        assert running.models[0].residency == "active"
        assert running.models[0].remaining_s > 0
        await it.peer.run("c2", body={"max_tokens": 2})
        await it.peer.end_of("c2")
        ended = await it.snapshot(lambda s: bool(s.ended), "an ended call")
        assert [e.grant.key for e in ended.ended] == [CallKey("c2")]
        assert ended.ended[0].age_s < 5


async def test_a_snapshot_names_the_prefixes_that_are_here_and_their_tier(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        history = await a_turn(it.peer, "a1", [])
        reply = it.peer.ended[0].reply
        tail = it.peer.ended[0].tail
        assert tail is not None
        found = await it.snapshot(lambda s: len(s.prefixes) == 2, "prompt and reply")
        tiers = {p.digest: (p.tier, p.tokens) for p in found.prefixes}
        assert tiers[tail.digest][0] == "device"
        assert tiers[reply][1] == tiers[tail.digest][1] + TOKENS
        await a_turn(it.peer, "b1", [], "m-b")
        await it.snapshot(
            lambda s: any(p.digest == tail.digest and p.tier == "host" for p in s.prefixes),
            "the prompt on the host",
        )
        assert history


async def test_a_snapshot_comes_when_asked_for_and_carries_the_epoch(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        subject = subjects.snapshot_request(INSTANCE)
        answer = await it.peer.bus.request(subject, encode(SnapshotRequest(epoch=9)), timeout_s=5.0)
        assert SNAPSHOT.decode(answer.payload).epoch_seen == 9


# --- host KV events -----------------------------------------------------------------------------


async def test_saved_and_dropped_blocks_are_told(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        events: list[KvSaved | KvDropped] = []

        async def keep(message: Msg) -> None:
            event = KV_EVENT.decode(message.payload)
            assert isinstance(event, KvSaved | KvDropped)
            events.append(event)

        await it.peer.bus.subscribe(subjects.ANY_KV, keep)
        await a_turn(it.peer, "a1", [])
        await eventually(lambda: len(events) >= 2, why="saved blocks")
        started, saved = events[:2]
        assert isinstance(started, KvDropped)
        assert started.is_all
        assert isinstance(saved, KvSaved)
        assert {e.session for e in saved.entries} == {subjects.session_key("", "s-m-a")}
        prefixes = tuple(e.prefix for e in saved.entries)
        await it.peer.bus.publish(
            subjects.instance_kv(INSTANCE), encode(EvictKv(prefixes=prefixes))
        )
        await eventually(lambda: len(events) == 3, why="dropped blocks")
        dropped = events[2]
        assert isinstance(dropped, KvDropped)
        assert set(dropped.prefixes) == set(prefixes)


# --- faults -------------------------------------------------------------------------------------


async def test_a_lost_bus_ends_open_calls_and_the_instance_comes_back(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        assert it.service.is_ready
        it.broker.down()
        assert not it.service.is_ready
        it.broker.up()
        back = await it.snapshot(lambda s: bool(s.ended), "the ended call")
        assert back.ended[0].reason is EndReason.FAILED
        assert back.live_grants == ()
        assert it.service.is_ready
        assert isinstance(await it.peer.run("c2", body={"max_tokens": 2}), Accepted)
        await it.peer.end_of("c2")


async def test_draining_refuses_new_runs_and_lets_accepted_calls_end(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", body={"max_tokens": 200, "ignore_eos": True})
        await it.peer.tokens_of("c1")
        draining = asyncio.create_task(it.service.drain())
        await it.snapshot(lambda s: s.is_draining, "the drain")
        refused = await it.peer.run("c2")
        assert isinstance(refused, Refused)
        assert refused.reason == "draining"
        await draining
        ended = await it.peer.end_of("c1")
        assert (ended.reason, ended.usage.completion_tokens) == (EndReason.FINISHED, 200)


async def test_a_drain_has_a_bound(tmp_path: Path) -> None:
    async with world(tmp_path, drain_s=0.2) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        await asyncio.wait_for(it.service.drain(), 2.0)
        await it.service.stop()
        ended = await it.peer.end_of("c1")
        assert ended.error is not None
        assert ended.error.code == "instance_lost"
        with pytest.raises(NoResponders):
            await it.peer.bus.request(subjects.run(INSTANCE), b"", timeout_s=1.0)


async def test_an_engine_that_raises_fails_its_calls_and_not_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = FakeEngine.activate

    async def failing(self: FakeEngine, model: str) -> Any:
        if model == "m-a":
            raise RuntimeError("no memory")
        return await activate(self, model)

    monkeypatch.setattr(FakeEngine, "activate", failing)
    async with world(tmp_path) as it:
        await it.peer.run("a1", model="m-a", body=SHORT)
        failed = await it.peer.end_of("a1")
        assert failed.error is not None
        assert failed.error.code == "model_failed"
        assert "no memory" in failed.error.detail
        await it.peer.run("b1", model="m-b", body=SHORT)
        assert (await it.peer.end_of("b1")).reason is EndReason.FINISHED
        assert it.service.is_ready


async def test_an_engine_that_keeps_failing_makes_the_instance_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(self: FakeEngine, model: str) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(FakeEngine, "activate", failing)
    async with world(tmp_path) as it:
        for n in range(3):
            await it.peer.run(f"c{n}", body=SHORT)
            await it.peer.end_of(f"c{n}")
        await it.snapshot(lambda s: not s.is_ready, "not ready")
        refused = await it.peer.run("c9")
        assert isinstance(refused, Refused)
        assert refused.reason == "not_ready"


# --- recording and traces -----------------------------------------------------------------------


async def some_traffic(it: World) -> None:
    history = await a_turn(it.peer, "a1", [])
    await it.peer.run("b1", model="m-b", body=SHORT)
    await it.peer.run("a9", model="m-a", body={"max_tokens": 500, "ignore_eos": True})
    await a_turn(it.peer, "a2", history)
    await it.peer.end_of("b1")
    await it.peer.end_of("a9")


async def test_a_recorded_live_run_replays_to_equal_decisions(tmp_path: Path) -> None:
    async with world(tmp_path, record_dir=str(tmp_path), t_ttft_s=0.8, slot_min_s=0.1) as it:
        await some_traffic(it)
    lines = (tmp_path / f"{INSTANCE}.scheduler.jsonl").read_bytes().splitlines()
    steps = [RECORDED.decode(line) for line in lines]
    config = SchedulerConfig(t_ttft_s=0.8, slot_min_s=0.1)
    fresh = Scheduler(config, policy_set("talaria"), ("m-a", "m-b"))
    for step in steps:
        assert fresh.step(step.event, step.now_s) == step.effects
    kinds = {type(effect) for step in steps for effect in step.effects}
    assert {Admit, SlotClosed} <= kinds
    assert any(isinstance(step.event, TimingChanged) for step in steps)
    assert len(kinds | {Interrupt}) > 4


async def test_the_parts_of_a_call_are_spans_below_it(tmp_path: Path) -> None:
    with OtlpSink() as sink:
        async with world(tmp_path, otlp=sink.url) as it:
            history = await a_turn(it.peer, "a1", [])
            await a_turn(it.peer, "b1", [], "m-b")
            await a_turn(it.peer, "a2", history)
            ended = await it.peer.end_of("a2")
        spans = [s for s in sink.spans if s.attributes.get("talaria.call.id") == "a2"]
        names = {s.name for s in spans}
        assert {"switch", "restore", "prefill", "decode", "kv_save"} <= names
        assert len({s.parent_id for s in spans}) == 1
        decode_s = sum(s.end_s - s.start_s for s in spans if s.name == "decode")
        assert decode_s == pytest.approx(ended.parts.decode_s, abs=0.005)


# --- settings -----------------------------------------------------------------------------------


def test_engines_are_not_mixed() -> None:
    from talaria_instance.config import InstanceConfig

    models = (ModelEntry(id="x", engine="fake"), ModelEntry(id="y", engine="torch"))
    with pytest.raises(ConfigError, match="one engine"):
        build_engine(None, InstanceConfig(), models, None)  # type: ignore[arg-type]


def test_a_policy_without_host_kv_overrides_the_engines_setting() -> None:
    from talaria_instance.engine.fake import FakeConfig

    table = {"keep_finished_kv": True, "decode_step_s": 0.5}
    config = engine_settings(table, FakeConfig, "instance.fake", keeps_finished_kv=False)
    assert not config.keep_finished_kv
    assert config.decode_step_s == 0.5


def test_a_wrong_engine_setting_is_named() -> None:
    from talaria_instance.engine.fake import FakeConfig

    with pytest.raises(ConfigError, match=r"\[instance.fake\].*speed"):
        engine_settings({"speed": 3}, FakeConfig, "instance.fake", keeps_finished_kv=True)
