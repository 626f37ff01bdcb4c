"""Where an accepted call's time goes on its instance: a partition by construction. Pure.

    queue ◀──▶ switch            waiting, or paused by a slot close; `switch` while the instance
      │                          switches to the call's model
      ▼
    prefill ──▶ decode           running; a restore's seconds move from prefill to restore when
                                 the engine reports them

The ledger is in exactly one state from acceptance to end, so the parts add up to the wall time
and none is computed by subtraction.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from talaria_common.errors import InvariantBroken
from talaria_common.wire import CallParts

Part: TypeAlias = Literal["queue", "switch", "restore", "prefill", "decode"]
PARTS: Final[tuple[Part, ...]] = ("queue", "switch", "restore", "prefill", "decode")

INTERVALS_KEPT: Final = 64
"""Intervals kept for the trace; a call that is paused more often shows its first ones."""


class Interval(msgspec.Struct, frozen=True):
    """One stay in a part."""

    part: Part
    start_s: float
    end_s: float


class Ledger:
    """Time of one call, from `now_s` of its acceptance on."""

    def __init__(self, now_s: float) -> None:
        self._accepted_s = now_s
        self._since_s = now_s
        self._part: Part = "queue"
        self._resumes: Part = "prefill"
        self._is_running = False
        self._is_ended = False
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.first_token_s: float | None = None
        """Acceptance to first token."""
        self.intervals: list[Interval] = []

    @property
    def part(self) -> Part:
        """Where the call is now."""
        return self._part

    @property
    def is_running(self) -> bool:
        """The engine may work on it: its slot is open."""
        return self._is_running

    def wall_s(self, now_s: float) -> float:
        """Acceptance to now."""
        return now_s - self._accepted_s

    def switching(self, now_s: float) -> None:
        """The instance starts to switch to the call's model."""
        if not self._is_running:
            self._enter("switch", now_s)

    def switched(self, now_s: float) -> None:
        """The switch is over; the call still waits."""
        if self._part == "switch":
            self._enter("queue", now_s)

    def running(self, now_s: float) -> None:
        """The engine has the call: admitted, or resumed where it was paused."""
        self._is_running = True
        self._enter(self._resumes, now_s)

    def restored(self, now_s: float, seconds: float) -> None:
        """`seconds` of the running prefill were spent on restoring KV from the host."""
        if self._part != "prefill":
            return
        restore_s = min(max(seconds, 0.0), now_s - self._since_s)
        middle_s = now_s - restore_s
        self._enter("restore", middle_s)
        self._enter("prefill", now_s)

    def first_token(self, now_s: float) -> None:
        """The prefill is done."""
        self._resumes = "decode"
        if self.first_token_s is None:
            self.first_token_s = now_s - self._accepted_s
        if self._is_running:
            self._enter("decode", now_s)

    def paused(self, now_s: float) -> None:
        """The call's slot has closed before the call was finished."""
        self._is_running = False
        self._enter("queue", now_s)

    def end(self, now_s: float) -> CallParts:
        """The call is over; its parts add up to `wall_s(now_s)`."""
        self._enter(self._part, now_s)
        self._is_ended = True
        parts = CallParts(
            queue_s=self._seconds["queue"],
            switch_s=self._seconds["switch"],
            restore_s=self._seconds["restore"],
            prefill_s=self._seconds["prefill"],
            decode_s=self._seconds["decode"],
        )
        self.check(now_s)
        return parts

    def check(self, now_s: float) -> None:
        """The parts add up to the time since acceptance."""
        known_s = sum(self._seconds.values()) + (now_s - self._since_s)
        if abs(known_s - self.wall_s(now_s)) > 1e-6:
            raise InvariantBroken(f"{known_s} s of {self.wall_s(now_s)} s are accounted for")

    def _enter(self, part: Part, now_s: float) -> None:
        if self._is_ended:
            raise InvariantBroken("the call is over")
        seconds = now_s - self._since_s
        if seconds < 0:
            raise InvariantBroken(f"time went back by {-seconds} s")
        self._seconds[self._part] += seconds
        if seconds > 0:
            self._note(Interval(self._part, self._since_s, now_s))
        self._since_s = now_s
        self._part = part

    def _note(self, interval: Interval) -> None:
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.part == interval.part and last.end_s == interval.start_s:
            self.intervals[-1] = Interval(last.part, last.start_s, interval.end_s)
        elif len(self.intervals) < INTERVALS_KEPT:
            self.intervals.append(interval)
