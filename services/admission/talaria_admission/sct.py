"""Session completion time as a partition of the session's wall time (protocols 13). Pure.

Each instant belongs to the open call that ends last; where no call is open it is tool gap. A call
that later-ending ones overlap therefore keeps a prefix of its interval: up to the earliest arrival
among those. Its parts fill that prefix in the order in which they happened, the rest of it is
`overlapped_s`, and what the parts do not explain is `unattributed_s`:

    sct_s = sum of all parts, tool gap and unattributed included

Nothing is computed by subtraction but `unattributed_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from talaria_common.wire import CallSettled, SessionParts

CALL_PARTS: Final = (
    "gateway_s",
    "place_s",
    "admit_s",
    "transfer_s",
    "queue_s",
    "switch_s",
    "restore_s",
    "prefill_s",
    "decode_s",
    "deliver_s",
)
"""A call's parts, in the order in which they happen."""

PENDING_MAX: Final = 64
"""Calls kept apart; an agent has a handful in parallel, and only those can still overlap."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A session's wall time so far and where it went."""

    sct_s: float = 0.0
    overlapped_s: float = 0.0
    parts: SessionParts = SessionParts()

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            sct_s=self.sct_s + other.sct_s,
            overlapped_s=self.overlapped_s + other.overlapped_s,
            parts=_sum(self.parts, other.parts),
        )


@dataclass(frozen=True, slots=True)
class _Interval:
    arrived_s: float
    ended_s: float
    parts_s: tuple[float, ...]
    is_clipped: bool = False


class SctAccount:
    """Takes settled calls in any order; `totals` is exact while at most 64 calls overlap."""

    def __init__(self, start_s: float, done: Totals | None = None) -> None:
        """Start at a wall-clock instant; `done`: totals of what came before, up to that instant."""
        self._base_s = start_s
        self._done = done or Totals()
        self._is_fresh = done is None
        self._pending: list[_Interval] = []
        self._last_end_s = start_s

    @property
    def last_end_s(self) -> float:
        """Latest end of a settled call, wall clock; the start if there is none."""
        return self._last_end_s

    def add(self, call: CallSettled) -> None:
        """Take one more call; each call once."""
        arrived_s, ended_s = call.arrived_unix_s, max(call.ended_unix_s, call.arrived_unix_s)
        if self._is_fresh:
            self._base_s = min(self._base_s, arrived_s)
        self._last_end_s = max(self._last_end_s, ended_s)
        before_s = min(ended_s, self._base_s) - arrived_s
        if before_s > 0:  # that time has been given to calls that were settled before
            self._done += Totals(overlapped_s=before_s)
        if ended_s <= self._base_s:
            return
        self._pending.append(
            _Interval(max(arrived_s, self._base_s), ended_s, _parts_s(call), before_s > 0)
        )
        if len(self._pending) > PENDING_MAX:
            self._fold()

    def totals(self) -> Totals:
        """The partition from the session's start to its last settled end."""
        return self._done + _partition(self._pending, self._base_s, math.inf)

    def _fold(self) -> None:
        """Make the older half final."""
        ordered = sorted(self._pending, key=lambda c: (c.ended_s, c.arrived_s))
        first, rest = ordered[: PENDING_MAX // 2], ordered[PENDING_MAX // 2 :]
        frontier_s = min(c.arrived_s for c in rest)
        self._done += _partition(first, self._base_s, frontier_s)
        self._base_s = max(self._base_s, min(frontier_s, first[-1].ended_s))
        self._pending = rest
        self._is_fresh = False


def _partition(calls: Iterable[_Interval], base_s: float, frontier_s: float) -> Totals:
    """Share out [base_s, min(last end, frontier_s)]; calls outside `calls` own all after it."""
    calls = list(calls)
    if not calls:
        return Totals()
    parts, overlapped_s, unattributed_s = [0.0] * len(CALL_PARTS), 0.0, 0.0
    owner_from_s = frontier_s
    for call in sorted(calls, key=lambda c: (-c.ended_s, c.arrived_s)):
        owned_s = max(0.0, min(call.ended_s, owner_from_s) - call.arrived_s)
        is_whole = owner_from_s >= call.ended_s and not call.is_clipped
        taken = call.parts_s if is_whole else _prefix(call.parts_s, owned_s)
        parts = [total + part for total, part in zip(parts, taken, strict=True)]
        overlapped_s += call.ended_s - call.arrived_s - owned_s
        unattributed_s += owned_s - sum(taken)
        owner_from_s = min(owner_from_s, call.arrived_s)
    end_s = min(frontier_s, max(c.ended_s for c in calls))
    named = dict(zip(CALL_PARTS, parts, strict=True))
    return Totals(
        sct_s=max(0.0, end_s - base_s),
        overlapped_s=overlapped_s,
        parts=SessionParts(
            **named, tool_gap_s=_gaps_s(calls, base_s, end_s), unattributed_s=unattributed_s
        ),
    )


def _gaps_s(calls: Iterable[_Interval], base_s: float, end_s: float) -> float:
    """Seconds of [base_s, end_s] in which no call is open."""
    gap_s, reached_s = 0.0, base_s
    for call in sorted(calls, key=lambda c: c.arrived_s):
        gap_s += max(0.0, min(call.arrived_s, end_s) - reached_s)
        reached_s = max(reached_s, call.ended_s)
    return gap_s


def _prefix(parts_s: tuple[float, ...], owned_s: float) -> tuple[float, ...]:
    """The first `owned_s` seconds of parts that follow each other."""
    out = []
    for part_s in parts_s:
        taken_s = min(part_s, owned_s)
        owned_s -= taken_s
        out.append(taken_s)
    return tuple(out)


def _parts_s(call: CallSettled) -> tuple[float, ...]:
    own = {name: getattr(call, name, 0.0) for name in CALL_PARTS}
    own |= msgspec.structs.asdict(call.parts)
    return tuple(own[name] for name in CALL_PARTS)


def _sum(a: SessionParts, b: SessionParts) -> SessionParts:
    left, right = msgspec.structs.asdict(a), msgspec.structs.asdict(b)
    return SessionParts(**{name: left[name] + right[name] for name in left})
