"""What others hear of this instance's host KV: saved, dropped, and the kv_save span. IO (bus)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from talaria_common import subjects
from talaria_common.clock import Clock
from talaria_common.wire import KvDropped, KvEntry, KvSaved
from talaria_instance.calls import Call
from talaria_instance.engine.protocol import KvBlock
from talaria_instance.outlet import Outlet
from talaria_instance.reports import CallSpans, Place

ENTRIES_MAX: Final = 2_000
"""Entries of one event: well below the largest message."""
SAVERS_KEPT: Final = 256
"""Finished calls whose save may still be told."""


class KvNews:
    """Publishes the engine's kv_saved and kv_dropped in batches."""

    def __init__(self, place: Place, outlet: Outlet, spans: CallSpans, clock: Clock) -> None:
        self._place = place
        self._outlet = outlet
        self._spans = spans
        self._clock = clock
        self._savers: OrderedDict[str, tuple[Call, float]] = OrderedDict()

    def restarted(self) -> None:
        """Nothing of an earlier boot is restorable."""
        self._post(KvDropped(**self._who, is_all=True))

    def finished(self, call: Call) -> None:
        """A call's KV is about to be saved."""
        self._savers[call.run.session] = (call, self._clock.unix_s())
        self._savers.move_to_end(call.run.session)
        while len(self._savers) > SAVERS_KEPT:
            self._savers.popitem(last=False)

    def saved(self, blocks: tuple[KvBlock, ...]) -> None:
        """Host copies are complete."""
        for start in range(0, len(blocks), ENTRIES_MAX):
            entries = tuple(_entry(block) for block in blocks[start : start + ENTRIES_MAX])
            self._post(KvSaved(**self._who, entries=entries))
        nbytes: dict[str, int] = {}
        for block in blocks:
            nbytes[block.session] = nbytes.get(block.session, 0) + block.nbytes
        for session in nbytes.keys() & self._savers.keys():
            call, since_unix_s = self._savers.pop(session)
            self._spans.kv_saved(call, since_unix_s, self._clock.unix_s(), nbytes[session])

    def dropped(self, prefixes: tuple[bytes, ...]) -> None:
        """Host copies are gone."""
        for start in range(0, len(prefixes), ENTRIES_MAX):
            self._post(KvDropped(**self._who, prefixes=prefixes[start : start + ENTRIES_MAX]))

    @property
    def _who(self) -> dict[str, str]:
        return {"instance": self._place.instance, "boot_id": self._place.boot_id}

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
