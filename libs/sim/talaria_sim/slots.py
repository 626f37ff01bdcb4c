"""Collecting the slots that instances close while a replay runs. IO (bus)."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

from talaria_common import subjects, wire
from talaria_common.bus import Bus, Msg, Subscription
from talaria_common.wire import SlotReport

SETTLE_S: Final = 1.5
"""A slot that was open at the end closes within this time, or is not counted."""


class SlotCollector:
    """Async context: slots heard on the bus between entry and exit."""

    def __init__(self, bus: Bus | None) -> None:
        self._bus = bus
        self._subscription: Subscription | None = None
        self._slots: list[SlotReport] = []

    async def __aenter__(self) -> SlotCollector:
        if self._bus is not None:
            self._subscription = await self._bus.subscribe(subjects.ANY_SLOT, self._heard)
            await self._bus.barrier()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def settle(self) -> None:
        """Give the last slots time to close."""
        await asyncio.sleep(SETTLE_S)

    async def _heard(self, message: Msg) -> None:
        report = wire.decode(wire.SLOT_REPORT, message.payload)
        if report is not None:
            self._slots.append(report)

    @property
    def slots(self) -> tuple[SlotReport, ...]:
        """In order of their opening."""
        return tuple(sorted(self._slots, key=lambda s: (s.opened_unix_s, s.instance, s.n)))
