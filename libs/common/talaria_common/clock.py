"""Clocks: the wall's, and a virtual one for tests and the simulator. IO (reads time)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell gets its `now_s` from."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything, and only in this process."""

    def unix_s(self) -> float:
        """Wall-clock seconds, for traces and SCT."""


class WallClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves when told to."""

    def __init__(self, now_s: float = 0.0, *, unix_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._offset_s = unix_s - now_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._offset_s

    def advance(self, seconds: float) -> None:
        """Move on; a negative step is an error."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._now_s += seconds
