"""Scripted peers of the gateway, built from the wire messages: a router, instances, admission. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from talaria_common import subjects, wire
from talaria_common.bodies import Assembler
from talaria_common.bus import Bus, Msg, Subscription
from talaria_common.clock import WallClock
from talaria_common.config import Settings, TelemetryConfig
from talaria_common.memory_bus import MemoryBroker
from talaria_common.policies import policy_set
from talaria_common.service import Context
from talaria_common.telemetry import Telemetry
from talaria_common.testing import eventually
from talaria_common.wire import (
    Accepted,
    BodyPart,
    CallKey,
    CallSettled,
    CancelAttempt,
    Delta,
    Ended,
    EndReason,
    ErrorInfo,
    FirstToken,
    Grant,
    Granted,
    LiveGrant,
    ModelState,
    NotGranted,
    PlaceCall,
    PlaceReason,
    PlaceReply,
    RunCall,
    SessionList,
    SessionRow,
    Snapshot,
    ToolDelta,
    Usage,
    Withdraw,
    Withdrawn,
    Working,
)
from talaria_gateway.config import GatewayConfig
from talaria_gateway.service import GatewayService

MODEL = "m1"
CONTEXT = 2048
USAGE = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=8)


class Emitter:
    """The stream of one attempt, as an instance sends it."""

    def __init__(self, bus: Bus, run: RunCall) -> None:
        self.run = run
        self.key = run.grant.key
        self.seq = 0
        self._bus = bus
        self._has_token = False

    async def working(self) -> None:
        await self._send(Working(key=self.key, seq=self._number()))

    async def text(self, text: str, *calls: ToolDelta, skip: int = 0) -> None:
        """Some output; `skip` messages before it are lost on the way."""
        self.seq += skip
        await self._send(
            Delta(key=self.key, seq=self._number(), text=text, tool_calls=calls, tokens=1)
        )
        if self.run.notify and not self._has_token:
            self._has_token = True
            await self._bus.publish(self.run.notify, wire.encode(FirstToken(key=self.key)))

    async def end(
        self,
        finish: Any = "stop",
        *,
        reason: EndReason = EndReason.FINISHED,
        error: ErrorInfo | None = None,
    ) -> None:
        ended = Ended(
            key=self.key,
            seq=self._number(),
            reason=reason,
            finish_reason=finish,
            usage=USAGE,
            error=error,
        )
        await self._send(ended)
        if self.run.notify:
            await self._bus.publish(self.run.notify, wire.encode(ended))

    async def _send(self, message: wire.Message) -> None:
        await self._bus.publish(self.run.inbox, wire.encode_as(message, self.run.encoding))

    def _number(self) -> int:
        self.seq += 1
        return self.seq


Script = Callable[[Emitter], Awaitable[None]]


async def say_hello(out: Emitter) -> None:
    """Two tokens and the end."""
    await out.text("Hel")
    await out.text("lo")
    await out.end()


async def say_nothing(out: Emitter) -> None:
    """Accepted, then not a word."""


async def go_on(out: Emitter) -> None:
    """Tokens for ever."""
    while True:
        await out.text("x")
        await asyncio.sleep(0.01)


class StubInstance:
    """An instance that answers runs by a script."""

    def __init__(self, bus: Bus, name: str, *, boot_id: str = "b1") -> None:
        self.bus = bus
        self.name = name
        self.boot_id = boot_id
        self.script: Script = say_hello
        self.reply: Callable[[RunCall], wire.RunReply | None] = lambda run: Accepted(
            key=run.grant.key
        )
        self.withdrawn: Callable[[CallKey], str] | None = None
        self.runs: list[RunCall] = []
        self.bodies: list[bytes] = []
        self.cancelled: list[CallKey] = []
        self.withdrawals: list[CallKey] = []
        self.beats = True
        self._assembler = Assembler()
        self._version = 0
        self._subscriptions: list[Any] = []
        self._tasks: dict[CallKey, asyncio.Task[None]] = {}
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for subject, handler in (
            (subjects.run(self.name), self._on_run),
            (subjects.body_part(self.name), self._on_part),
            (subjects.attempt(self.name), self._on_attempt),
            (subjects.snapshot_request(self.name), self._on_snapshot_request),
        ):
            self._subscriptions.append(await self.bus.subscribe(subject, handler))
        await self.snapshot()
        self._beat = asyncio.create_task(self._heartbeat())

    async def die(self) -> None:
        """Gone without a word."""
        if self._beat is not None:
            self._beat.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def snapshot(self) -> None:
        self._version += 1
        running = {key for key, task in self._tasks.items() if not task.done()}
        state = ModelState(
            model=MODEL, residency="active", calls_running=len(running), max_model_len=CONTEXT
        )
        snapshot = Snapshot(
            instance=self.name,
            boot_id=self.boot_id,
            version=self._version,
            models=(state,),
            live_grants=tuple(
                LiveGrant(grant=run.grant, session=run.session, call_index=run.call_index)
                for run in self.runs
                if run.grant.key in running
            ),
        )
        await self.bus.publish(subjects.snapshot(self.name), wire.encode(snapshot))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            with contextlib.suppress(Exception):
                if self.beats:
                    await self.snapshot()

    async def _on_part(self, message: Msg) -> None:
        part = wire.decode(wire.INSTANCE_COMMAND, message.payload)
        assert isinstance(part, BodyPart)
        self._assembler.add(part, 0.0)

    async def _on_run(self, message: Msg) -> None:
        run = wire.decode(wire.INSTANCE_COMMAND, message.payload)
        assert isinstance(run, RunCall)
        body = await eventually(lambda: self._assembler.take(run, 0.0), 2, "the parts came")
        self.runs.append(run)
        self.bodies.append(body)
        reply = self.reply(run)
        if reply is not None:
            await self.bus.publish(message.reply, wire.encode(reply))
        if isinstance(reply, Accepted):
            self.play(run)

    def play(self, run: RunCall) -> None:
        """Run the script for an attempt."""
        emitter = Emitter(self.bus, run)
        self._tasks[run.grant.key] = asyncio.create_task(self._play(emitter))

    async def _play(self, emitter: Emitter) -> None:
        await self.script(emitter)

    async def _on_attempt(self, message: Msg) -> None:
        command = wire.decode(wire.INSTANCE_COMMAND, message.payload)
        assert isinstance(command, CancelAttempt | Withdraw)
        if isinstance(command, Withdraw):
            self.withdrawals.append(command.key)
            if self.withdrawn is None:
                return
            outcome: Any = self.withdrawn(command.key)
        else:
            self.cancelled.append(command.key)
            outcome = "stopped"
            if command.key in self._tasks:
                self._tasks[command.key].cancel()
        answer = Withdrawn(key=command.key, outcome=outcome)
        await self.bus.publish(message.reply, wire.encode(answer))

    async def _on_snapshot_request(self, message: Msg) -> None:
        await self.snapshot()
        if message.reply:
            await self.bus.publish(message.reply, b"")


class StubRouter:
    """Places a call on the first instance that is not excluded."""

    def __init__(self, bus: Bus, instances: list[StubInstance]) -> None:
        self.bus = bus
        self.instances = instances
        self.places: list[PlaceCall] = []
        self.decide: Callable[[PlaceCall], PlaceReply | None] = self.first
        self._granted = 0
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self.bus.subscribe(
            subjects.PLACE, self._on_place, queue="router"
        )

    async def die(self) -> None:
        """Leave the bus until the next start."""
        assert self._subscription is not None
        await self._subscription.unsubscribe()

    async def _on_place(self, message: Msg) -> None:
        place = wire.decode(wire.PLACE_CALL, message.payload)
        assert place is not None
        if not place.model:
            reply: PlaceReply | None = refuse(place, "unknown_model")
        else:
            self.places.append(place)
            reply = self.decide(place)
        if reply is not None:
            await self.bus.publish(message.reply, wire.encode(reply))

    def first(self, place: PlaceCall) -> PlaceReply:
        names = [i for i in self.instances if i.name not in place.excluded]
        names.sort(key=lambda i: i.name in place.ranked_last)
        if not names:
            return refuse(place, "no_instance")
        self._granted += 1
        grant = Grant(
            epoch=1,
            n=self._granted,
            key=place.key,
            instance=names[0].name,
            boot_id=names[0].boot_id,
            model=place.model,
            charge_s=0.1,
        )
        return Granted(
            grant=grant,
            session=place.session or f"derived-{place.links[0].digest.hex()}",
            source=place.source,
            call_index=0,
            parent=place.parent,
            reason=PlaceReason.RANKED,
            place_s=0.001,
            admit_s=0.001,
        )


def refuse(place: PlaceCall, code: str, retry_after_s: float | None = None) -> NotGranted:
    """The router's no."""
    error = ErrorInfo(code=code, detail=f"no: {code}", retry_after_s=retry_after_s)
    return NotGranted(key=place.key, error=error)


class StubAdmission:
    """Hears settled calls and cancels; knows one session."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.settled: list[CallSettled] = []
        self.cancels: list[str] = []
        self.queries: list[wire.SessionQuery] = []
        self.rows: list[SessionRow] = []

    async def start(self) -> None:
        await self.bus.subscribe(subjects.ANY_CALL_SETTLED, self._on_settled)
        await self.bus.subscribe(subjects.ANY_CANCEL, self._on_cancel)
        await self.bus.subscribe(subjects.SESSIONS, self._on_query, queue="admission")

    async def _on_settled(self, message: Msg) -> None:
        settled = wire.decode(wire.CALL_SETTLED, message.payload)
        assert settled is not None
        self.settled.append(settled)

    async def _on_cancel(self, message: Msg) -> None:
        cancel = wire.decode(wire.CANCEL_CALL, message.payload)
        if cancel is not None:
            self.cancels.append(cancel.call_id)

    async def _on_query(self, message: Msg) -> None:
        query = wire.decode(wire.SESSION_QUERY, message.payload)
        assert query is not None
        self.queries.append(query)
        rows = tuple(row for row in self.rows if row.tenant == query.tenant)
        answer: wire.SessionAnswer = SessionList(sessions=rows)
        if not isinstance(query, wire.GetSessions):
            rows = tuple(row for row in rows if row.id == query.session)
            error = ErrorInfo(code="unknown_session", detail="no such session")
            answer = (
                SessionList(
                    sessions=rows,
                    decisions=(
                        wire.Decision(
                            call_id="c",
                            attempt=1,
                            call_index=0,
                            model=MODEL,
                            instance="i-1",
                            reason="ranked",
                        ),
                    ),
                )
                if rows
                else NotGranted(key=CallKey("query"), error=error)
            )
        await self.bus.publish(message.reply, wire.encode(answer))


class World:
    """A gateway on a free port with its scripted peers."""

    def __init__(self, broker: MemoryBroker, http: httpx.AsyncClient, service: Any) -> None:
        self.broker = broker
        self.http = http
        self.service = service
        self.bus = broker.connect("test")
        self.instances = [StubInstance(broker.connect(n), n) for n in ("i-1", "i-2")]
        self.router = StubRouter(broker.connect("router"), self.instances)
        self.admission = StubAdmission(broker.connect("admission"))

    @property
    def one(self) -> StubInstance:
        return self.instances[0]

    @property
    def two(self) -> StubInstance:
        return self.instances[1]

    def post(self, body: Any = None, headers: dict[str, str] | None = None, **extra: Any) -> Any:
        """A chat call, to be awaited."""
        path = "/v1/chat/completions"
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers=headers)
        return self.http.post(path, json=body or chat(**extra), headers=headers)

    def stream(self, headers: dict[str, str] | None = None, **extra: Any) -> Any:
        body = chat(stream=True, **extra)
        return self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 if it has none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in (await self.http.get("/metrics")).text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.split("{")[0] == name and all(w in head for w in wanted):
                return float(value)
        return 0.0


def chat(text: str = "Hi.", **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **extra}


def context(broker: MemoryBroker, folder: Path, member: str = "gateway-1") -> Context:
    telemetry = Telemetry.create(TelemetryConfig(), service="gateway", member=member)
    return Context(
        member=member,
        settings=Settings({}, {}, "test"),
        policy=policy_set("talaria"),
        bus=broker.connect(member),
        body_bus=broker.connect(f"{member}-bodies"),
        clock=WallClock(),
        telemetry=telemetry,
        data_dir=folder,
    )


FAST: dict[str, Any] = {
    "port": 0,
    "place_timeout_s": 0.5,
    "accept_timeout_s": 0.3,
    "accept_timeout_large_s": 0.5,
    "silence_s": 1.0,
    "probe_after_s": 0.4,
    "hold_status_s": 0.5,
    "keep_alive_s": 0.2,
    "drain_s": 2.0,
}
"""The protocol's times, shortened."""


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    """Everything up and heard of."""
    broker = MemoryBroker()
    service = GatewayService(context(broker, folder), GatewayConfig(**(FAST | settings)))
    await service.start()
    async with httpx.AsyncClient(
        base_url=service.url, timeout=20, trust_env=False, verify=False
    ) as http:
        world = World(broker, http, service)
        await world.router.start()
        await world.admission.start()
        for instance in world.instances:
            await instance.start()
        try:
            await eventually(lambda: _is_ready(http), 5, "the gateway is ready")
            yield world
        finally:
            await service.stop()
            for instance in world.instances:
                await instance.die()


async def _is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/health/ready")).status_code == 200
