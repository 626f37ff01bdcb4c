"""nats-py's client with three of its habits mended. IO.

- A transport that cannot flush to a dead peer is aborted: closing it waited for 15 minutes, and
  the reconnect with it.
- An error line of the server costs the connection, not the client: it closed for good.
- What was buffered when the connection broke is dropped: it was sent to the next server, however
  much later that came, when whoever asked had long given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Final
from urllib.parse import ParseResult

from nats import errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

FLUSH_ON_CLOSE_S: Final = 0.5
PEER_SILENT_MS: Final = 6_000
"""Unacknowledged bytes after which the kernel gives a connection up: three server pings."""


class Transport(TcpTransport):
    """TCP that gives a dead peer up."""

    def __bool__(self) -> bool:
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        await super().connect(uri, buffer_size, connect_timeout)
        assert self._io_writer is not None
        raw = self._io_writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_SILENT_MS)

    async def wait_closed(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_ON_CLOSE_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]
        except TimeoutError:
            assert self._io_writer is not None
            self._io_writer.transport.abort()


class NatsClient(Client):
    """nats-py's client, made to stay."""

    def __init__(self) -> None:
        super().__init__()
        self._transport = Transport()  # type: ignore[no-untyped-call]

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg.lower():
            await self._error_cb(errors.Error(f"nats: {err_msg}"))
        else:
            await self._process_op_err(errors.Error(f"nats: {err_msg}"))

    def forget_unsent(self) -> None:
        """Drop what is buffered and release who waits for it to be flushed."""
        self._pending.clear()
        self._pending_data_size = 0
        queue: Any = self._flush_queue
        while queue is not None and not queue.empty():
            flushed = queue.get_nowait()
            if not flushed.done():
                flushed.set_result(None)

    async def end_interest(self, sid: int) -> None:
        """Send UNSUB but keep the subscription: what is on its way is still handled.

        Subscription.drain sends a PING for that which overtakes the UNSUB.
        """
        await self._send_unsubscribe(sid)

    async def close_quietly(self) -> None:
        """Close, whatever state the connection is in."""
        with contextlib.suppress(errors.Error, OSError, asyncio.TimeoutError):
            await self.close()
