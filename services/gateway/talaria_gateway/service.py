"""The gateway: both doors, and the snapshots that they need. IO."""

from __future__ import annotations

from talaria_common import subjects, wire
from talaria_common.bus import Msg
from talaria_common.service import Context
from talaria_gateway.calls import Calls
from talaria_gateway.config import GatewayConfig
from talaria_gateway.http_app import HttpServer, build_app
from talaria_gateway.http_read import Telling
from talaria_gateway.intake import Intake
from talaria_gateway.nats_door import NatsDoor
from talaria_gateway.pool import Pool


class GatewayService:
    """One member of the gateway."""

    def __init__(self, context: Context, config: GatewayConfig) -> None:
        self._context = context
        self._pool = Pool()
        self._calls = Calls(context, config, self._pool)
        intake, telling = Intake(self._calls), Telling(self._calls)
        self._nats_door = NatsDoor(self._calls, intake, telling.model_list)
        self._server = HttpServer(build_app(self._calls, intake, telling), config)

    @property
    def url(self) -> str:
        """Base URL of the HTTP door, once started."""
        return self._server.url

    async def start(self) -> None:
        """Listen on the bus and on the port; raises PortTaken."""
        bus = self._context.bus
        await bus.subscribe(subjects.ANY_SNAPSHOT, self._on_snapshot)
        await self._calls.start()
        await bus.barrier()
        await self._server.start()
        await self._nats_door.start()
        await bus.barrier()

    async def drain(self) -> None:
        """Let open calls end, for at most `drain_s`; new ones are refused."""
        await self._nats_door.drain()
        await self._calls.drain()

    async def stop(self) -> None:
        """End everything at once; idempotent."""
        await self._nats_door.drain()
        await self._calls.stop()
        await self._server.stop()

    async def _on_snapshot(self, message: Msg) -> None:
        snapshot = wire.decode(wire.SNAPSHOT, message.payload)
        if snapshot is None:
            self._calls.unreadable()
        else:
            self._pool.hear(snapshot, self._context.clock.now_s())
