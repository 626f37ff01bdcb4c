"""What others hear of this instance's host KV: saved, dropped, and the kv_save span. IO (bus)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeVar

from talaria_common import subjects
from talaria_common.clock import Clock
from talaria_common.wire import KvDropped, KvEntry, KvSaved
from talaria_instance.calls import Call
from talaria_instance.engine.protocol import KvBlock
from talaria_instance.outlet import Outlet
from talaria_instance.reports import CallSpans, Place

ENTRIES_MAX: Final = 2_000
"""Entries of one event: well below the largest message."""
SESSIONS_KEPT: Final = 256
"""Sessions whose save and end are brought together."""

V = TypeVar("V")


class KvNews:
    """Publishes the engine's kv_saved and kv_dropped in batches."""

    def __init__(self, place: Place, outlet: Outlet, spans: CallSpans, clock: Clock) -> None:
        self._place = place
        self._outlet = outlet
        self._spans = spans
        self._clock = clock
        self._finished: OrderedDict[str, tuple[Call, float]] = OrderedDict()
        """By tenant's session: its last finished call, and when it ended."""
        self._early: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By session: blocks saved before its call was told to have ended."""

    def restarted(self) -> None:
        """Nothing of an earlier boot is restorable."""
        self._post(self._dropped(is_all=True))

    def finished(self, call: Call) -> None:
        """A call's KV is being saved, or has been already."""
        session = subjects.session_key(call.run.tenant, call.run.session)
        now_unix_s = self._clock.unix_s()
        early = self._early.pop(session, None)
        if early is None:
            _keep(self._finished, session, (call, now_unix_s))
        else:
            self._finished.pop(session, None)
            self._spans.kv_saved(call, early[0], now_unix_s, early[1])

    def saved(self, blocks: tuple[KvBlock, ...]) -> None:
        """Host copies are complete."""
        for start in range(0, len(blocks), ENTRIES_MAX):
            entries = tuple(_entry(block) for block in blocks[start : start + ENTRIES_MAX])
            place = self._place
            saved = KvSaved(instance=place.instance, boot_id=place.boot_id, entries=entries)
            self._post(saved)
        nbytes: dict[str, int] = {}
        for block in blocks:
            nbytes[block.session] = nbytes.get(block.session, 0) + block.nbytes
        now_unix_s = self._clock.unix_s()
        for session, count in nbytes.items():
            if session in self._finished:
                call, since_unix_s = self._finished.pop(session)
                self._spans.kv_saved(call, since_unix_s, now_unix_s, count)
            else:
                since_unix_s, before = self._early.get(session, (now_unix_s, 0))
                _keep(self._early, session, (since_unix_s, before + count))

    def dropped(self, prefixes: tuple[bytes, ...]) -> None:
        """Host copies are gone."""
        for start in range(0, len(prefixes), ENTRIES_MAX):
            self._post(self._dropped(prefixes[start : start + ENTRIES_MAX]))

    def _dropped(self, prefixes: tuple[bytes, ...] = (), *, is_all: bool = False) -> KvDropped:
        return KvDropped(
            instance=self._place.instance,
            boot_id=self._place.boot_id,
            prefixes=prefixes,
            is_all=is_all,
        )

    def _post(self, event: KvSaved | KvDropped) -> None:
        self._outlet.post(subjects.kv_events(self._place.instance), event)


def _entry(block: KvBlock) -> KvEntry:
    return KvEntry(
        prefix=block.prefix,
        parent=block.parent,
        model=block.model,
        tokens=block.tokens,
        nbytes=block.nbytes,
        session=block.session,
    )


def _keep(table: OrderedDict[str, V], session: str, value: V) -> None:
    table[session] = value
    table.move_to_end(session)
    while len(table) > SESSIONS_KEPT:
        table.popitem(last=False)
