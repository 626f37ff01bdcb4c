"""The deployment's own nats-server: started, watched, started again if it dies. IO."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Final

from talaria_common.errors import TalariaError
from talaria_common.natsd import NatsServer

WATCH_S: Final = 0.2

_log = logging.getLogger(__name__)


class OwnNats:
    """Async context: a server on a free port of this machine; gives its URL."""

    def __init__(self, store_dir: Path) -> None:
        self._server = NatsServer(store_dir)
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> str:
        await asyncio.to_thread(self._server.start)
        self._watcher = asyncio.create_task(self._watch())
        return self._server.url

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await asyncio.to_thread(self._server.stop)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self._server.is_running:
                continue
            _log.warning("the nats-server has ended and is started again")
            try:
                await asyncio.to_thread(self._restart)
            except TalariaError as error:
                _log.error("the nats-server does not start", extra={"reason": error.detail})

    def _restart(self) -> None:
        self._server.kill()  # Releases what the dead one held.
        self._server.start()
