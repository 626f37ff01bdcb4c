"""A JetStream key-value bucket as a Bucket. IO.

`watch` outlives restarts of the server: it starts a new watcher after each reconnect and compares
what that lists with what it has told, so that every change is told once, deletions too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from talaria_common.bus import BusDown, KvChange, WrongRevision

T = TypeVar("T")

TOMBSTONE_S: Final = 3600.0
"""How long a deletion's marker is kept; a watcher that was away for longer compares instead."""
POLL_S: Final = 0.2
RETRY_S: Final = 0.2


class Link(Protocol):
    """What a bucket needs to know of its connection."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def generation(self) -> int:
        """Counts the connections made."""

    async def while_up(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do `work`; `BusDown` as soon as the connection is lost, or not there."""


class NatsBucket:
    """One bucket."""

    def __init__(self, link: Link, kv: KeyValue) -> None:
        self._link = link
        self._kv = kv

    @classmethod
    async def open(cls, link: Link, jetstream: JetStreamContext, name: str) -> NatsBucket:
        """The bucket of that name, created on file storage if it is not there."""
        config = KeyValueConfig(bucket=name, storage=StorageType.FILE, direct=True)
        try:
            kv = await link.while_up(lambda: _answered(jetstream.create_key_value(config)))
        except BadRequestError:  # it is there, made with other settings
            kv = await link.while_up(lambda: _answered(jetstream.key_value(name)))
        return cls(link, kv)

    async def get(self, key: str) -> KvChange | None:
        try:
            entry = await self._link.while_up(lambda: _answered(self._kv.get(key)))
        except KeyNotFoundError:
            return None
        return KvChange(key, entry.value or b"", entry.revision or 0)

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        def write() -> Coroutine[Any, Any, int]:
            match revision:
                case None:
                    return self._kv.put(key, value)
                case 0:
                    return self._kv.create(key, value)
                case _:
                    return self._kv.update(key, value, last=revision)

        try:
            return await self._link.while_up(lambda: _answered(write()))
        except KeyWrongLastSequenceError as error:
            raise WrongRevision(key) from error

    async def delete(self, key: str) -> None:
        await self._link.while_up(lambda: _answered(self._kv.purge(key, msg_ttl=TOMBSTONE_S)))

    async def watch(self) -> AsyncIterator[KvChange | None]:
        told: dict[str, int] = {}
        is_first = True
        while not self._link.is_closed:
            generation = self._link.generation
            try:
                watcher: Any = await self._link.while_up(lambda: _answered(self._kv.watchall()))
            except BusDown:
                await asyncio.sleep(RETRY_S)
                continue
            unlisted: set[str] | None = set(told)
            try:
                while generation == self._link.generation and not self._link.is_closed:
                    try:
                        entry = await watcher.updates(timeout=POLL_S)
                    except nats.errors.TimeoutError:
                        continue
                    if entry is not None:
                        if unlisted is not None:
                            unlisted.discard(entry.key)
                        change = _news(told, entry)
                        if change is not None:
                            yield change
                        continue
                    for key in sorted(unlisted or ()):
                        yield KvChange(key, None, told.pop(key))
                    unlisted = None
                    if is_first:
                        is_first = False
                        yield None
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await watcher.stop()


def _news(told: dict[str, int], entry: KeyValue.Entry) -> KvChange | None:
    """The entry as a change, or None if it was told before; `told` is brought up to date."""
    revision = entry.revision or 0
    if entry.operation is not None:  # a marker of a deletion
        return KvChange(entry.key, None, revision) if told.pop(entry.key, None) else None
    if told.get(entry.key) == revision:
        return None
    told[entry.key] = revision
    return KvChange(entry.key, entry.value or b"", revision)


async def _answered(work: Coroutine[Any, Any, T]) -> T:
    """`work`, with JetStream's silence told as `BusDown`."""
    try:
        return await work
    except (nats.errors.TimeoutError, nats.errors.NoRespondersError) as error:
        raise BusDown("JetStream does not answer") from error
    except nats.js.errors.ServiceUnavailableError as error:
        raise BusDown(f"JetStream is not available: {error.description}") from error
    except nats.js.errors.NoStreamResponseError as error:
        raise BusDown("JetStream has no stream for the bucket") from error
    except KeyNotFoundError:
        raise
    except nats.js.errors.NotFoundError as error:  # the server has come back without its store
        raise BusDown("JetStream has lost the bucket") from error
    except (
        nats.errors.ConnectionClosedError,
        nats.errors.ConnectionDrainingError,
        nats.errors.OutboundBufferLimitError,
    ) as error:
        raise BusDown(str(error)) from error
