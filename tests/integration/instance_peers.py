"""An instance with the fake engine, and a scripted gateway for it. IO."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from talaria_common import bodies, subjects
from talaria_common.bus import Bus, Msg
from talaria_common.chain import links, root
from talaria_common.clock import WallClock
from talaria_common.config import Settings, TelemetryConfig
from talaria_common.memory_bus import MemoryBroker
from talaria_common.policies import policy_set
from talaria_common.service import Context
from talaria_common.telemetry import Telemetry
from talaria_common.testing import eventually
from talaria_common.wire import (
    CALL_ENDED,
    NOTICE,
    RUN_REPLY,
    SLOT_REPORT,
    SNAPSHOT,
    STREAM,
    WITHDRAWN,
    CallEnded,
    CallKey,
    CancelAttempt,
    Delta,
    Ended,
    Grant,
    Notice,
    RunCall,
    RunReply,
    SlotReport,
    Snapshot,
    StreamMessage,
    Withdraw,
    Withdrawn,
    encode,
)
from talaria_instance.main import create
from talaria_instance.service import InstanceService

T = TypeVar("T")

INSTANCE = "i-1"
FAST = {"prefill_token_s": 0.00002, "decode_step_s": 0.002, "block_tokens": 4}


@dataclass
class Heard:
    """What came to one attempt's inbox."""

    messages: list[StreamMessage] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(m.text for m in self.messages if isinstance(m, Delta))

    @property
    def tokens(self) -> int:
        return sum(m.tokens for m in self.messages if isinstance(m, Delta))

    @property
    def ends(self) -> list[Ended]:
        return [m for m in self.messages if isinstance(m, Ended)]


class Peer:
    """A gateway and an observer."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard: defaultdict[CallKey, Heard] = defaultdict(Heard)
        self.listeners: dict[CallKey, Any] = {}
        self.snapshots: list[Snapshot] = []
        self.ended: list[CallEnded] = []
        self.slots: list[SlotReport] = []
        self.notices: list[Notice] = []
        self.subjects: list[str] = []
        """Of all messages since `watch`, in order of publication."""

    async def start(self) -> None:
        await self.bus.subscribe(subjects.ANY_SNAPSHOT, self._on_snapshot)
        await self.bus.subscribe(subjects.ANY_CALL_ENDED, self._on_ended)
        await self.bus.subscribe(subjects.ANY_SLOT, self._on_slot)
        await self.bus.subscribe(subjects.gateway_notify("g"), self._on_notice)
        await self.bus.barrier()

    async def watch(self) -> None:
        """Note the subject of every message; from now on every subject has a listener."""
        await self.bus.subscribe(">", self._on_any)

    async def _on_any(self, message: Msg) -> None:
        self.subjects.append(message.subject)

    async def _on_snapshot(self, message: Msg) -> None:
        self.snapshots.append(SNAPSHOT.decode(message.payload))

    async def _on_ended(self, message: Msg) -> None:
        self.ended.append(CALL_ENDED.decode(message.payload))

    async def _on_slot(self, message: Msg) -> None:
        self.slots.append(SLOT_REPORT.decode(message.payload))

    async def _on_notice(self, message: Msg) -> None:
        self.notices.append(NOTICE.decode(message.payload))

    @property
    def snapshot(self) -> Snapshot:
        return self.snapshots[-1]

    async def a_run(
        self,
        call_id: str,
        *,
        attempt: int = 1,
        model: str = "m-a",
        boot_id: str | None = None,
        epoch: int = 1,
        messages: list[dict[str, Any]] | None = None,
        body: dict[str, Any] | bytes | None = None,
        tools: Any = None,
        **fields: Any,
    ) -> RunCall:
        """A run as the gateway sends it; its inbox is listened to."""
        key = CallKey(call_id, attempt)
        if boot_id is None:
            await eventually(lambda: self.snapshots, why="a snapshot")
            boot_id = self.snapshot.boot_id
        messages = messages or [{"role": "user", "content": f"hello {call_id}"}]
        if not isinstance(body, bytes):
            body = msgspec.json.encode({"model": model, "messages": messages} | (body or {}))
        inbox = self.bus.new_inbox()
        self.listeners[key] = await self.bus.listen(inbox, self._stream_of(key))
        grant = Grant(
            epoch=epoch,
            n=1,
            key=key,
            instance=INSTANCE,
            boot_id=boot_id,
            model=model,
            charge_s=1.0,
        )
        return RunCall(
            grant=grant,
            endpoint="chat",
            session=fields.pop("session", f"s-{call_id}"),
            call_index=0,
            body=body,
            inbox=inbox,
            tail=links(root("", model, tools), messages)[-1],
            **fields,
        )

    def _stream_of(self, key: CallKey) -> Callable[[Msg], Any]:
        async def on_message(message: Msg) -> None:
            self.heard[key].messages.append(STREAM.decode(message.payload))

        return on_message

    async def send(self, run: RunCall) -> RunReply:
        subject = subjects.run(INSTANCE)
        answer = await self.bus.request(subject, encode(run), timeout_s=5.0)
        return RUN_REPLY.decode(answer.payload)

    async def run(self, call_id: str, **fields: Any) -> RunReply:
        return await self.send(await self.a_run(call_id, **fields))

    async def send_in_parts(self, run: RunCall) -> RunReply:
        body, parts, digest = bodies.split(run.grant.key, run.body)
        for part in parts:
            await self.bus.publish(subjects.body_part(INSTANCE), encode(part))
        run = msgspec.structs.replace(run, body=body, parts=len(parts), digest=digest)
        return await self.send(run)

    async def ask(self, command: CancelAttempt | Withdraw) -> Withdrawn:
        subject = subjects.attempt(INSTANCE)
        answer = await self.bus.request(subject, encode(command), timeout_s=5.0)
        return WITHDRAWN.decode(answer.payload)

    async def end_of(self, call_id: str, attempt: int = 1, within_s: float = 10.0) -> Ended:
        heard = self.heard[CallKey(call_id, attempt)]
        await eventually(lambda: heard.ends, within_s, f"the end of {call_id}")
        return heard.ends[0]

    async def tokens_of(self, call_id: str, attempt: int = 1) -> None:
        heard = self.heard[CallKey(call_id, attempt)]
        await eventually(lambda: heard.tokens, 10.0, f"tokens of {call_id}")


@dataclass
class World:
    """Everything that a test needs."""

    broker: MemoryBroker
    service: InstanceService
    peer: Peer
    telemetry: Telemetry

    async def snapshot(self, check: Callable[[Snapshot], bool], why: str) -> Snapshot:
        """A snapshot from now on for which `check` holds."""
        start = len(self.peer.snapshots)
        found = await eventually(
            lambda: [s for s in self.peer.snapshots[start:] if check(s)], why=why
        )
        return found[0]

    def metric(self, name: str, **labels: str) -> float:
        value = self.telemetry.metrics.registry.get_sample_value(name, labels)
        return math.nan if value is None else value


@contextlib.asynccontextmanager
async def world(
    tmp_path: Path,
    *,
    policy: str = "talaria",
    models: tuple[str, ...] = ("m-a", "m-b"),
    fake: dict[str, Any] | None = None,
    otlp: str = "",
    record_dir: str = "",
    **instance: Any,
) -> AsyncIterator[World]:
    """One instance on a bus in memory, stopped at the end."""
    broker = MemoryBroker()
    tables = {
        "models": [{"id": m, "engine": "fake", "weight_bytes": 100_000_000} for m in models],
        "instance": {"t_ttft_s": 2.0, "fake": FAST | (fake or {})} | instance,
        "telemetry": {"record_dir": record_dir, "otlp_endpoint": otlp},
    }
    settings = Settings(tables, {}, "test")
    telemetry = Telemetry.create(
        settings.section("telemetry", TelemetryConfig),
        service="instance",
        member=INSTANCE,
    )
    context = Context(
        member=INSTANCE,
        settings=settings,
        policy=policy_set(policy),
        bus=broker.connect("i"),
        body_bus=broker.connect("i-body"),
        clock=WallClock(),
        telemetry=telemetry,
        data_dir=tmp_path,
    )
    service = create(context)
    assert isinstance(service, InstanceService)
    peer = Peer(broker.connect("g"))
    await peer.start()
    await service.start()
    try:
        yield World(broker, service, peer, telemetry)
    finally:
        broker.up()
        await service.stop()
        telemetry.close()
        for bus in (context.bus, context.body_bus, peer.bus):
            await bus.close()
