"""The session table's backup in a JetStream bucket: read at start, written behind. IO.

Every write is a compare-and-set on the row's revision and carries the writer's epoch; a row of a
higher epoch is never overwritten. A stale row costs time, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from talaria_common import subjects, wire
from talaria_common.bus import Bucket, Bus, BusDown, WrongRevision
from talaria_common.wire import SessionRow

RETRY_S: Final = 0.5
_encoder: Final = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)


class Backup:
    """Rows to be saved wait in a set: however often one changes, it is written once a batch."""

    def __init__(
        self, bus: Bus, row_of: Callable[[str, str], SessionRow | None], period_s: float
    ) -> None:
        self._bus = bus
        self._row_of = row_of
        self._period_s = period_s
        self._bucket: Bucket | None = None
        self._revisions: dict[str, int] = {}
        self._dirty: dict[tuple[str, str], None] = {}
        self._has_dirty = asyncio.Event()

    async def load(self) -> list[SessionRow]:
        """All rows; those that cannot be read are skipped. Raises BusDown."""
        rows: list[SessionRow] = []
        bucket = await self._open()
        async for change in bucket.watch():
            if change is None:
                break
            if change.value is None:
                continue
            self._revisions[change.key] = change.revision
            row = wire.decode(wire.SESSION_ROW, change.value)
            if row is None:
                _log.warning("unreadable session row", extra={"key": change.key})
            else:
                rows.append(row)
        return rows

    def touch(self, tenant: str, session: str) -> None:
        """The row has changed, or the session is forgotten."""
        self._dirty[tenant, session] = None
        self._has_dirty.set()

    async def run(self) -> None:
        """Write batches for ever."""
        while True:
            await self._has_dirty.wait()
            await asyncio.sleep(self._period_s)
            try:
                await self.flush()
            except BusDown:
                self._bucket = None  # made anew, should the server have lost it
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Write what is waiting. Raises BusDown; what was not written waits on."""
        bucket = await self._open()
        while self._dirty:
            tenant, session = next(iter(self._dirty))
            # Taken out first: a change during the write makes it wait again.
            del self._dirty[tenant, session]
            try:
                await self._save(bucket, tenant, session)
            except BusDown:
                self._dirty[tenant, session] = None
                raise
        self._has_dirty.clear()

    async def _save(self, bucket: Bucket, tenant: str, session: str) -> None:
        key = subjects.session_key(tenant, session)
        row = self._row_of(tenant, session)
        if row is None:
            if self._revisions.pop(key, None) is not None:
                await bucket.delete(key)
            return
        value = _encoder.encode(row)
        for _ in range(2):
            try:
                revision = self._revisions.get(key, 0)
                self._revisions[key] = await bucket.put(key, value, revision=revision)
                return
            except WrongRevision:
                held = await bucket.get(key)
                theirs = wire.decode(wire.SESSION_ROW, held.value or b"") if held else None
                if theirs is not None and theirs.epoch > row.epoch:
                    _log.error("a later leader owns this row", extra={"key": key})
                    return
                self._revisions[key] = held.revision if held is not None else 0
        _log.warning("session row not saved, it is being written elsewhere", extra={"key": key})

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._bus.bucket(subjects.SESSION_BUCKET)
        return self._bucket


async def leader_epoch(bus: Bus, member: str) -> int:
    """A number above that of every leader before, from a bucket on file storage. Raises BusDown."""
    bucket = await bus.bucket(subjects.LEADER_BUCKET)
    return await bucket.put("leader", member.encode())
