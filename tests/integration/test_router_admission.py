"""Router and admission together on a real nats-server, with scripted instances around them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from talaria_admission.config import AdmissionConfig
from talaria_admission.events import Event as AdmissionEvent
from talaria_admission.main import create as create_admission
from talaria_admission.policy import Admission
from talaria_common import subjects, wire
from talaria_common.bus import Msg, Subscription
from talaria_common.clock import WallClock
from talaria_common.config import Settings, TelemetryConfig
from talaria_common.ids import new_ulid
from talaria_common.nats_bus import NatsBus
from talaria_common.natsd import NatsServer
from talaria_common.policies import policy_set
from talaria_common.service import Context, Service
from talaria_common.telemetry import Spans, Telemetry
from talaria_common.testing import eventually
from talaria_common.wire import (
    CallEnded,
    CallKey,
    CallSettled,
    EndReason,
    Granted,
    HeldPrefix,
    Link,
    LiveGrant,
    ModelState,
    NotGranted,
    PlaceCall,
    PlaceReason,
    PlaceReply,
    Usage,
)
from talaria_router.main import create as create_router

MODEL = "m1"
BEAT_S = 0.1


@dataclass
class Peer:
    """An instance as the others see it: heartbeats, runs that it is told to hold, cancels."""

    bus: NatsBus
    name: str
    model: str = MODEL
    live: dict[CallKey, LiveGrant] = field(default_factory=dict)
    prefixes: tuple[HeldPrefix, ...] = ()
    cancelled: list[CallKey] = field(default_factory=list)
    version: int = 0
    subscriptions: list[Subscription] = field(default_factory=list)
    beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for subject, handler in (
            (subjects.attempt(self.name), self.on_attempt),
            (subjects.snapshot_request(self.name), self.on_request),
        ):
            self.subscriptions.append(await self.bus.subscribe(subject, handler))
        self.beating = asyncio.create_task(self.beat())

    async def beat(self) -> None:
        while True:
            await self.publish()
            await asyncio.sleep(BEAT_S)

    async def publish(self) -> None:
        self.version += 1
        model = ModelState(
            model=self.model,
            residency="active",
            prefill_token_s=0.001,
            decode_step_s=0.01,
            max_model_len=2048,
        )
        snapshot = wire.Snapshot(
            instance=self.name,
            boot_id="b1",
            version=self.version,
            models=(model,),
            live_grants=tuple(self.live.values()),
            prefixes=self.prefixes,
        )
        with contextlib.suppress(Exception):
            await self.bus.publish(subjects.snapshot(self.name), wire.encode(snapshot))

    async def on_attempt(self, msg: Msg) -> None:
        command = wire.INSTANCE_COMMAND.decode(msg.payload)
        self.cancelled.append(command.key)
        self.live.pop(command.key, None)
        answer = wire.Withdrawn(key=command.key, outcome="stopped")
        await self.bus.publish(msg.reply, wire.encode(answer))

    async def on_request(self, msg: Msg) -> None:
        await self.publish()

    def run(self, granted: Granted, links: tuple[Link, ...]) -> None:
        self.live[granted.grant.key] = LiveGrant(
            grant=granted.grant,
            session=granted.session,
            call_index=granted.call_index,
            tail=links[-1] if links else None,
        )

    async def die(self) -> None:
        if self.beating is not None:
            self.beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.beating
            self.beating = None
        while self.subscriptions:
            await self.subscriptions.pop().unsubscribe()


@dataclass
class Cluster:
    """Services and peers on one server; `bus` is the gateway's."""

    url: str
    bus: NatsBus
    folder: Path
    record_dir: str = ""
    exporters: list[InMemorySpanExporter] = field(default_factory=list)
    services: list[tuple[Service, NatsBus, Telemetry]] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)

    async def serve(self, name: str) -> Service:
        bus = await NatsBus.connect(self.url, name=name)
        create = {"router": create_router, "admission": create_admission}[name]
        exporter = InMemorySpanExporter()
        self.exporters.append(exporter)
        telemetry = Telemetry.create(
            TelemetryConfig(), service=name, member=name, exporter=exporter
        )
        env = {"TALARIA_TELEMETRY__RECORD_DIR": self.record_dir} if self.record_dir else {}
        context = Context(
            member=name,
            settings=Settings.load(None, env),
            policy=policy_set("talaria"),
            bus=bus,
            body_bus=bus,
            clock=WallClock(),
            telemetry=telemetry,
            data_dir=self.folder,
        )
        service = create(context)
        await service.start()
        self.services.append((service, bus, telemetry))
        return service

    async def peer(self, name: str, model: str = MODEL) -> Peer:
        peer = Peer(await NatsBus.connect(self.url, name=name), name, model)
        await peer.start()
        self.peers.append(peer)
        return peer

    async def stop(self, service: Service) -> None:
        entry = next(e for e in self.services if e[0] is service)
        self.services.remove(entry)
        await service.drain()
        await service.stop()
        entry[2].close()
        await entry[1].close()

    async def close(self) -> None:
        for service, _, _ in reversed(list(self.services)):
            await self.stop(service)
        for peer in self.peers:
            await peer.die()
            await peer.bus.close()
        await self.bus.close()

    # --- what a gateway does ---

    async def place(
        self, links: tuple[Link, ...] = (), *, call_id: str = "", attempt: int = 1, **more: Any
    ) -> PlaceReply:
        fields: dict[str, Any] = {"model": MODEL, "arrived_unix_s": time.time()}
        place = PlaceCall(
            key=CallKey(call_id or new_ulid(), attempt), links=links, **(fields | more)
        )
        answer = await self.bus.request(subjects.PLACE, wire.encode(place), timeout_s=4)
        return wire.PLACE_REPLY.decode(answer.payload)

    async def granted(self, links: tuple[Link, ...] = (), **more: Any) -> Granted:
        """Place until it is granted: heartbeats may still be on their way."""

        async def ask() -> Granted | None:
            answer = await self.place(links, **more)
            return answer if isinstance(answer, Granted) else None

        return await eventually(ask, 5, "a grant")

    async def end(self, granted: Granted, links: tuple[Link, ...], **more: Any) -> None:
        end = CallEnded(
            grant=granted.grant,
            session=granted.session,
            call_index=granted.call_index,
            tail=links[-1] if links else None,
            reason=EndReason.FINISHED,
            usage=Usage(prompt_tokens=20, completion_tokens=5),
            prefix_tier="device",
            **more,
        )
        key = granted.grant.key
        await self.bus.publish(subjects.call_ended(key.call_id), wire.encode(end))

    async def settle(self, granted: Granted, began_unix_s: float, ended_unix_s: float) -> None:
        settled = CallSettled(
            key=granted.grant.key,
            session=granted.session,
            call_index=granted.call_index,
            model=MODEL,
            outcome="finished",
            arrived_unix_s=began_unix_s,
            ended_unix_s=ended_unix_s,
        )
        call_id = granted.grant.key.call_id
        await self.bus.publish(subjects.call_settled(call_id), wire.encode(settled))

    async def query(self, question: wire.SessionQuery) -> wire.SessionAnswer:
        answer = await self.bus.request(subjects.SESSIONS, wire.encode(question), timeout_s=2)
        return wire.SESSION_ANSWER.decode(answer.payload)

    async def row(self, session: str) -> wire.SessionRow | None:
        answer = await self.query(wire.GetSession(session=session))
        return answer.sessions[0] if isinstance(answer, wire.SessionList) else None


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A server of its own: sessions of one test are not those of another."""
    server = NatsServer(tmp_path / "nats").start()
    bus = await NatsBus.connect(server.url, name="gateway")
    cluster = Cluster(server.url, bus, tmp_path)
    yield cluster
    await cluster.close()
    server.stop()


async def a_pair(cluster: Cluster, *instances: str) -> tuple[Service, Service]:
    for instance in instances or ("i-1", "i-2"):
        await cluster.peer(instance)
    admission = await cluster.serve("admission")
    router = await cluster.serve("router")
    return admission, router


def a_prompt(*texts: str) -> tuple[Link, ...]:
    """Links of a history; a text that starts with `a:` is a reply."""
    links, whole = [], ""
    for text in texts:
        whole += "|" + text
        links.append(Link(whole.encode(), 10 * len(whole), text.startswith("a:")))
    return tuple(links)


async def test_a_return_goes_home_under_its_lease(cluster: Cluster) -> None:
    await a_pair(cluster)
    prompt = a_prompt(f"u {new_ulid()}")
    first = await cluster.granted(prompt)
    assert first.reason is PlaceReason.RANKED
    assert first.cost is not None
    assert first.source == "derived"
    await cluster.end(first, prompt)
    await eventually(lambda: has_ended(cluster, first), 2, "the end is heard")
    back = await cluster.place((*prompt, *a_prompt("x", "a:r", "u2")[1:]))
    assert isinstance(back, Granted)
    assert (back.reason, back.session, back.call_index) == (PlaceReason.LEASE, first.session, 1)
    assert back.grant.instance == first.grant.instance
    assert back.grant.lease_of == first.grant.n
    assert back.place_s > 0
    assert back.admit_s > 0


async def has_ended(cluster: Cluster, granted: Granted) -> bool:
    row = await cluster.row(granted.session)
    return row is not None and row.in_flight == 0 and row.calls > 0


async def test_an_unknown_model_is_the_callers_mistake(cluster: Cluster) -> None:
    await a_pair(cluster)
    answer = await cluster.place(model="no-such-model", session="s", source="header")
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "unknown_model"
    assert await cluster.row("s") is None


async def test_the_same_question_gets_the_same_grant(cluster: Cluster) -> None:
    await a_pair(cluster)
    first = await cluster.granted()
    again = await cluster.place(call_id=first.grant.key.call_id)
    assert isinstance(again, Granted)
    assert (again.grant, again.reason) == (first.grant, PlaceReason.REPEATED)


async def test_a_burst_is_spread_by_the_account_that_no_snapshot_shows_yet(
    cluster: Cluster,
) -> None:
    await a_pair(cluster)
    await cluster.granted()
    instances = set()
    for _ in range(6):
        instances.add((await cluster.granted(max_tokens=500)).grant.instance)
        await asyncio.sleep(0.06)  # admission publishes its account at most each 50 ms
    assert instances == {"i-1", "i-2"}


async def test_a_call_waits_for_admission_to_come_back(cluster: Cluster) -> None:
    admission, _ = await a_pair(cluster)
    await cluster.granted()
    await cluster.stop(admission)
    asked = asyncio.create_task(cluster.place())
    await asyncio.sleep(0)
    await cluster.serve("admission")
    assert isinstance(await asked, Granted)


async def test_without_admission_a_call_is_refused_within_the_gateways_patience(
    cluster: Cluster,
) -> None:
    admission, _ = await a_pair(cluster)
    await cluster.granted()
    await cluster.stop(admission)
    answer = await cluster.place()
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "no_instance"
    assert 2.5 < answer.admit_s < 3.8


async def test_a_restarted_admission_knows_its_sessions_and_running_calls(
    cluster: Cluster,
) -> None:
    admission, _ = await a_pair(cluster)
    prompt = a_prompt(f"u {new_ulid()}")
    first = await cluster.granted(prompt)
    await cluster.end(first, prompt)
    await eventually(lambda: has_ended(cluster, first), 2, "the end is heard")
    running = await cluster.granted(a_prompt("other"), session="s2", source="header")
    peer = next(p for p in cluster.peers if p.name == running.grant.instance)
    peer.run(running, a_prompt("other"))
    await eventually(lambda: is_accepted(cluster, "s2"), 2, "the run is listed")

    await cluster.stop(admission)
    await cluster.serve("admission")
    row = await cluster.row(first.session)
    assert row is not None
    assert (row.calls, row.usage.prompt_tokens) == (1, 20)
    other = await cluster.row("s2")
    assert other is not None
    assert other.in_flight == 1
    back = await cluster.granted((*prompt, *a_prompt("x", "a:r", "u2")[1:]))
    assert (back.session, back.call_index) == (first.session, 1)
    assert back.grant.epoch > first.grant.epoch


async def is_accepted(cluster: Cluster, session: str) -> bool:
    row = await cluster.row(session)
    return row is not None and row.calls == 1


async def test_a_clients_cancel_reaches_the_instance(cluster: Cluster) -> None:
    await a_pair(cluster)
    granted = await cluster.granted()
    peer = next(p for p in cluster.peers if p.name == granted.grant.instance)
    peer.run(granted, ())
    key = granted.grant.key
    await cluster.bus.publish(
        subjects.cancel(key.call_id), wire.encode(wire.CancelCall(call_id=key.call_id))
    )
    await eventually(lambda: key in peer.cancelled, 2, "the instance is told")
    answer = await cluster.place(call_id=key.call_id, attempt=2)
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "cancelled"


async def test_a_dead_instance_leaves_the_candidates_within_two_heartbeats(
    cluster: Cluster,
) -> None:
    await a_pair(cluster)
    await cluster.granted()
    await cluster.peers[0].die()
    died_s = time.monotonic()

    async def avoids_it() -> bool:
        answers = [await cluster.place() for _ in range(2)]
        return all(isinstance(a, Granted) and a.grant.instance == "i-2" for a in answers)

    await eventually(avoids_it, 2, "all go to the other one")
    assert time.monotonic() - died_s < 1.5
    await cluster.peers[1].die()

    async def has_none() -> bool:
        answer = await cluster.place()
        return isinstance(answer, NotGranted) and answer.error.code == "no_instance"

    await eventually(has_none, 3, "nobody is left")


async def test_sessions_are_listed_by_tenant_explained_and_ended(cluster: Cluster) -> None:
    await a_pair(cluster)
    for tenant in ("t1", "t2"):
        await cluster.granted(session="a.b/c d", source="header", tenant=tenant)
    listed = await cluster.query(wire.GetSessions(tenant="t1"))
    assert isinstance(listed, wire.SessionList)
    assert [s.id for s in listed.sessions] == ["a.b/c d"]
    explained = await cluster.query(wire.GetSession(tenant="t1", session="a.b/c d"))
    assert isinstance(explained, wire.SessionList)
    assert [d.reason for d in explained.decisions] == ["ranked"]
    ended = await cluster.query(wire.EndSession(tenant="t1", session="a.b/c d"))
    assert isinstance(ended, wire.SessionList)
    assert ended.sessions[0].state == "closed"
    unknown = await cluster.query(wire.GetSession(tenant="t3", session="a.b/c d"))
    assert isinstance(unknown, NotGranted)
    assert unknown.error.code == "unknown_session"


async def test_a_session_is_one_tree_of_spans(cluster: Cluster) -> None:
    admission, router = await a_pair(cluster)
    prompt = a_prompt(f"u {new_ulid()}")
    began = time.time()
    first = await cluster.granted(prompt)
    await cluster.end(first, prompt)
    await cluster.settle(first, began, time.time())
    await eventually(lambda: has_settled(cluster, first), 2, "the account is heard")
    more = (*prompt, *a_prompt("x", "a:r", "u2")[1:])
    second = await cluster.granted(more, is_final=True)
    await cluster.end(second, more)
    await cluster.settle(second, time.time(), time.time() + 0.001)
    await eventually(lambda: is_closed(cluster, second), 2, "the session is over")
    await cluster.stop(router)
    await cluster.stop(admission)
    spans = [s for e in cluster.exporters for s in e.get_finished_spans()]
    assert {f"{s.context.trace_id:032x}" for s in spans} == {Spans.trace_id("", first.session)}
    names = sorted(s.name for s in spans)
    assert names == ["admit", "admit", "place", "place", "session", "session.start", "tool_gap"]
    (root,) = (s for s in spans if s.parent is None)
    gap = next(s for s in spans if s.name == "tool_gap")
    assert gap.parent is not None
    assert gap.parent.span_id == root.context.span_id
    assert root.start_time <= min(s.start_time for s in spans)


async def has_settled(cluster: Cluster, granted: Granted) -> bool:
    row = await cluster.row(granted.session)
    return row is not None and row.sct_s > 0 and row.calls > 0


async def is_closed(cluster: Cluster, granted: Granted) -> bool:
    row = await cluster.row(granted.session)
    return row is not None and row.state == "closed"


async def test_a_recording_replayed_through_a_fresh_policy_gives_equal_effects(
    cluster: Cluster,
) -> None:
    cluster.record_dir = str(cluster.folder / "records")
    admission, _ = await a_pair(cluster)
    prompt = a_prompt("u")
    granted = await cluster.granted(prompt)
    await cluster.end(granted, prompt)
    await eventually(lambda: has_ended(cluster, granted), 2, "the end is heard")
    await cluster.stop(admission)

    lines = (cluster.folder / "records" / "admission.jsonl").read_bytes().splitlines()
    decoder = msgspec.json.Decoder(AdmissionEvent)
    policy = Admission(AdmissionConfig(), policy_set("talaria"))
    kinds = set()
    for line in lines:
        entry = msgspec.json.decode(line)
        event = decoder.decode(msgspec.json.encode(entry["event"]))
        effects = policy.step(event, entry["now_s"])
        assert msgspec.json.decode(msgspec.json.encode(effects)) == entry["effects"]
        kinds.add(entry["event"]["type"])
    assert {"loaded", "opened", "admit", "snapshot", "call_ended", "closing"} <= kinds


async def test_after_a_restart_of_nats_calls_are_placed_again(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats").start()
    bus = await NatsBus.connect(server.url, name="gateway")
    cluster = Cluster(server.url, bus, tmp_path)
    await a_pair(cluster)
    first = await cluster.granted(session="s", source="header")
    server.kill()
    server.start()

    async def is_placed() -> bool:
        try:
            answer = await cluster.place(session="s", source="header")
        except Exception:
            return False
        return isinstance(answer, Granted) and answer.call_index > first.call_index

    await eventually(is_placed, 5, "calls are placed after the server's return")
    await cluster.close()
    server.stop()
