"""What waits for the reader of one call. IO (event loop)."""

from __future__ import annotations

import asyncio

import msgspec

from talaria_common.errors import TalariaError
from talaria_common.wire import Delta, Ended, Granted


class Started(msgspec.Struct, frozen=True):
    """An instance has accepted the call."""

    granted: Granted


class Failed(msgspec.Struct, frozen=True):
    """The call has ended without an answer."""

    error: TalariaError


Event = Started | Delta | Ended | Failed
"""An `Ended` is always a finished call; everything else that ends one is `Failed`."""


class Outbox:
    """A queue from a call to its reader; the call's side never waits."""

    def __init__(self) -> None:
        self._waiting: list[Event] = []
        self._is_filled = asyncio.Event()
        self.nbytes = 0
        """About what waits in memory."""

    def put(self, event: Event, nbytes: int = 0) -> None:
        self._waiting.append(event)
        self.nbytes += nbytes
        self._is_filled.set()

    async def take(self, within_s: float | None) -> list[Event]:
        """Everything that waits, in order; empty after `within_s` without an event."""
        if not self._waiting:
            self._is_filled.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._is_filled.wait()
            except TimeoutError:
                return []
        taken, self._waiting, self.nbytes = self._waiting, [], 0
        return taken
