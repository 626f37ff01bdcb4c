"""The kvstore service on a real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from talaria_common import subjects, wire
from talaria_common.bus import Msg
from talaria_common.clock import WallClock
from talaria_common.config import Settings, TelemetryConfig
from talaria_common.nats_bus import NatsBus
from talaria_common.natsd import NatsServer
from talaria_common.policies import policy_set
from talaria_common.service import Context
from talaria_common.telemetry import Telemetry
from talaria_common.testing import eventually
from talaria_kvstore.main import create

BLOCK_BYTES = 100


@dataclass
class Node:
    """A running kvstore, seen from an instance's side of the bus."""

    bus: NatsBus
    telemetry: Telemetry
    evictions: list[bytes] = field(default_factory=list)

    async def save(self, instance: str, *prefixes: bytes, boot: str = "boot-1") -> None:
        entries = tuple(
            wire.KvEntry(prefix=p, parent=p[:-1], model="m", tokens=16, nbytes=BLOCK_BYTES)
            for p in prefixes
        )
        await self.tell(wire.KvSaved(instance=instance, boot_id=boot, entries=entries))

    async def tell(self, event: wire.KvEvent) -> None:
        await self.bus.publish(subjects.kv_events(event.instance), wire.encode(event))

    async def lookup(self, *prefixes: bytes) -> dict[str, int]:
        answer = await self.bus.request(
            subjects.KVSTORE,
            wire.encode(wire.KvLookup(model="m", prefixes=prefixes)),
            timeout_s=2,
        )
        return wire.KV_FOUND.decode(answer.payload).blocks_by_instance

    async def stats(self) -> wire.KvStats:
        answer = await self.bus.request(subjects.KVSTORE, wire.encode(wire.KvStats()), timeout_s=2)
        return wire.KV_STATS.decode(answer.payload)

    async def finds(self, wanted: dict[str, int], *prefixes: bytes) -> None:
        async def check() -> bool:
            return await self.lookup(*prefixes) == wanted

        await eventually(check, 5, f"the registry finds {wanted}")


OpenNode = Callable[..., Awaitable[Node]]


@pytest.fixture
async def open_node(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[OpenNode]:
    """Starts kvstores with the given settings and stops them."""
    closers = []

    async def start(**settings: object) -> Node:
        bus = await NatsBus.connect(nats_server.url, name="kvstore")
        mine = await NatsBus.connect(nats_server.url, name="instance")
        telemetry = Telemetry.create(TelemetryConfig(), service="kvstore", member="kvstore-1")
        context = Context(
            member="kvstore-1",
            settings=Settings({"kvstore": settings}, {}, "test"),
            policy=policy_set("talaria"),
            bus=bus,
            body_bus=bus,
            clock=WallClock(),
            telemetry=telemetry,
            data_dir=tmp_path,
        )
        service = create(context)
        node = Node(mine, telemetry)

        async def on_evict(msg: Msg) -> None:
            message = wire.decode(wire.EVICT_KV, msg.payload)
            assert message is not None
            node.evictions += message.prefixes

        await mine.subscribe(subjects.instance_kv("i-1"), on_evict)
        await service.start()
        closers.extend([service.stop, service.stop, bus.close, mine.close])
        return node

    yield start
    for close in closers:
        await close()


async def test_what_instances_say_is_found(open_node: OpenNode) -> None:
    node = await open_node()
    await node.save("i-1", b"a", b"ab", b"abc")
    await node.save("i-2", b"a")
    await node.finds({"i-1": 3, "i-2": 1}, b"a", b"ab", b"abc", b"abcd")
    await node.tell(wire.KvDropped(instance="i-1", boot_id="boot-1", prefixes=(b"ab", b"abc")))
    await node.finds({"i-1": 1, "i-2": 1}, b"a", b"ab", b"abc")
    stats = await node.stats()
    assert (stats.entries, stats.nbytes) == (1, 2 * BLOCK_BYTES)
    assert stats.by_instance == {"i-1": BLOCK_BYTES, "i-2": BLOCK_BYTES}
    assert b'talaria_kv_bytes{instance="i-2"} 100.0' in node.telemetry.metrics.text()


async def test_a_restarted_instance_holds_nothing(open_node: OpenNode) -> None:
    node = await open_node()
    await node.save("i-1", b"a")
    await node.save("i-2", b"a")
    await node.finds({"i-1": 1, "i-2": 1}, b"a")
    snapshot = wire.Snapshot(instance="i-1", boot_id="boot-2", version=1)
    await node.bus.publish(subjects.snapshot("i-1"), wire.encode(snapshot))
    await node.tell(wire.KvDropped(instance="i-2", boot_id="boot-1", is_all=True))
    await node.finds({}, b"a")
    await node.save("i-1", b"a", boot="boot-1")
    await node.save("i-1", b"b", boot="boot-2")
    await node.finds({"i-1": 1}, b"b")
    assert await node.lookup(b"a") == {}


async def test_a_silent_instance_is_not_offered(open_node: OpenNode) -> None:
    node = await open_node(silent_s=0.3, forget_s=0.6, sweep_s=0.05)
    await node.save("i-1", b"a")
    await node.finds({"i-1": 1}, b"a")
    await node.finds({}, b"a")

    async def is_forgotten() -> bool:
        return (await node.stats()).entries == 0

    await eventually(is_forgotten, 5, "its entries are forgotten")


async def test_over_the_budget_leaves_are_evicted_once(open_node: OpenNode) -> None:
    node = await open_node(budget_bytes=4 * BLOCK_BYTES, evict_to_share=0.5, evict_batch=1)
    await node.save("i-1", b"a", b"ab", b"abc")
    await node.save("i-1", b"x", b"xy")
    await eventually(lambda: len(node.evictions) == 3, 5, "three blocks are evicted")
    assert node.evictions == [b"abc", b"ab", b"a"]
    gone = tuple(node.evictions)
    await node.tell(wire.KvDropped(instance="i-1", boot_id="boot-1", prefixes=gone))
    await node.finds({}, b"a")
    stats = await node.stats()
    assert (stats.nbytes, stats.evicted) == (2 * BLOCK_BYTES, 3)
    assert len(node.evictions) == 3


async def test_an_eviction_that_is_never_confirmed_is_repeated_then_disbelieved(
    open_node: OpenNode,
) -> None:
    node = await open_node(budget_bytes=BLOCK_BYTES, evict_retry_s=0.1, evict_tries=2, sweep_s=0.05)
    await node.save("i-1", b"a", b"ab")
    await eventually(lambda: len(node.evictions) >= 2, 5, "it is asked for again")

    async def is_within() -> bool:
        return (await node.stats()).nbytes <= BLOCK_BYTES

    await eventually(is_within, 5, "what the instance does not confirm is disbelieved")


async def test_nonsense_is_counted_and_hurts_nobody(open_node: OpenNode) -> None:
    node = await open_node()
    for subject in (subjects.kv_events("i-1"), subjects.snapshot("i-1"), subjects.KVSTORE):
        await node.bus.publish(subject, b"\xff\x00nonsense")
    await node.save("i-1", b"a")
    await node.finds({"i-1": 1}, b"a")

    def counted() -> bool:
        name = b'talaria_kv_events_dropped_total{cause="unreadable"} 3.0'
        return name in node.telemetry.metrics.text()

    await eventually(counted, 5, "all three are counted")
