"""All services of a deployment in this process. IO.

Order of starting: those that others ask first. The gateway answers from the beginning and tells
by /health/ready when calls can be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from dataclasses import dataclass
from typing import Final

from talaria_cli.deployment import Deployment
from talaria_cli.failure import CommandFailed
from talaria_common.bus import Bus
from talaria_common.clock import WallClock
from talaria_common.config import TelemetryConfig
from talaria_common.nats_bus import NatsBus
from talaria_common.service import Context, Service
from talaria_common.telemetry import Telemetry

SERVICES: Final = ("kvstore", "admission", "router", "gateway", "instance")
"""In order of starting."""
WITH_BODIES: Final = frozenset({"gateway", "instance"})
"""These get a second connection, so that bodies do not delay tokens."""
DRAIN_ORDER: Final = ("gateway", "router", "instance", "admission", "kvstore")

_log = logging.getLogger(__name__)


def members(instances: int) -> list[tuple[str, str]]:
    """(service, member) of a whole deployment, in order of starting."""
    out: list[tuple[str, str]] = []
    for service in SERVICES:
        if service == "instance":
            out += [(service, f"i-{n}") for n in range(1, instances + 1)]
        else:
            out.append((service, f"{service}-1"))
    return out


@dataclass
class Running:
    """One service with what was made for it."""

    name: str
    member: str
    service: Service
    context: Context

    async def close(self) -> None:
        """Stop the service, then its connections; idempotent."""
        await self.service.stop()
        await self.context.body_bus.close()
        await self.context.bus.close()
        await asyncio.to_thread(self.context.telemetry.close)


async def connect(deployment: Deployment, nats_url: str, name: str) -> Bus:
    """A connection to the deployment's bus. Raises `CommandFailed` if nobody answers there."""
    config = deployment.bus
    try:
        return await NatsBus.connect(
            nats_url, name=name, user=config.user, password=config.password
        )
    except Exception as error:
        raise CommandFailed(f"no NATS server at {nats_url}: {error}") from error


async def build(deployment: Deployment, nats_url: str, name: str, member: str) -> Running:
    """Connect and create one service; it is not started yet."""
    module = importlib.import_module(f"talaria_{name}.main")
    settings = deployment.settings
    async with contextlib.AsyncExitStack() as on_failure:
        bus = body_bus = await connect(deployment, nats_url, member)
        on_failure.push_async_callback(bus.close)
        if name in WITH_BODIES:
            body_bus = await connect(deployment, nats_url, f"{member}-bodies")
            on_failure.push_async_callback(body_bus.close)
        telemetry = Telemetry.create(
            settings.section("telemetry", TelemetryConfig), service=name, member=member
        )
        on_failure.callback(telemetry.close)
        context = Context(
            member=member,
            settings=settings,
            policy=deployment.policy,
            bus=bus,
            body_bus=body_bus,
            clock=WallClock(),
            telemetry=telemetry,
            data_dir=deployment.data_dir / member,
        )
        service: Service = module.create(context)
        on_failure.pop_all()
    return Running(name, member, service, context)


class Stack:
    """The services of one process, started and stopped together."""

    def __init__(self, deployment: Deployment, nats_url: str) -> None:
        self._deployment = deployment
        self._nats_url = nats_url
        self._running: list[Running] = []

    async def start(self, wanted: list[tuple[str, str]]) -> None:
        """Start `wanted` (service, member); the instances load their models at the same time."""
        for name, member in wanted:
            running = await build(self._deployment, self._nats_url, name, member)
            self._running.append(running)
            if name != "instance":
                await running.service.start()
        async with asyncio.TaskGroup() as group:
            for running in self._running:
                if running.name == "instance":
                    group.create_task(running.service.start())

    async def drain(self) -> None:
        """Let accepted work end, front door first."""
        for name in DRAIN_ORDER:
            for running in self._running:
                if running.name == name:
                    await running.service.drain()

    async def stop(self) -> None:
        """Stop everything, last started first; a failure does not keep the others alive."""
        for running in reversed(self._running):
            try:
                await running.close()
            except Exception:
                _log.exception("a service did not stop cleanly", extra={"member": running.member})
        self._running.clear()
