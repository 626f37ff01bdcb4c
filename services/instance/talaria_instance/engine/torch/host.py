"""KV blocks in host memory: copies of finished calls by prefix, private images of paused ones. Pure.

    claim ──▶ being written ──complete──▶ held ──unpin──▶ kept (shared), evicted LRU
                                                      └─▶ freed (private)

Called from the event loop, the engine thread and the transfer thread: one lock, short sections.
A copy is visible to others only when it is complete and shared; a pinned one is never dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from talaria_common.errors import InvariantBroken

B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockName:
    """What a host copy is a copy of."""

    model: str
    prefix: bytes
    parent: bytes
    index: int
    """Position in its sequence, in blocks."""
    tokens: int
    """In this block; fewer than a full block only in a private copy."""
    session: str
    is_shared: bool
    """Others may use it; False: it belongs to one paused call."""


@dataclass(slots=True, eq=False)
class HostBlock(Generic[B]):
    """One host copy."""

    name: BlockName
    nbytes: int
    buffer: B
    pins: int = 1
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class Claim(Generic[B]):
    """Answer to a claim: a pinned copy, or None when there is no room."""

    block: HostBlock[B] | None
    is_new: bool
    dropped: tuple[bytes, ...] = ()
    """Prefixes that had to go."""


class HostPool(Generic[B]):
    """Bounded host memory for KV copies."""

    def __init__(self, limit_bytes: int, make_buffer: Callable[[int], B]) -> None:
        self._limit_bytes = limit_bytes
        self._make_buffer = make_buffer
        self._lock = threading.Lock()
        self._shared: OrderedDict[bytes, HostBlock[B]] = OrderedDict()
        self._spare: dict[int, list[B]] = {}
        self._live_bytes = 0
        self._spare_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of live copies."""
        return self._live_bytes

    def held_blocks(self, prefixes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain can be restored; changes nothing."""
        count = 0
        with self._lock:
            for prefix in prefixes:
                block = self._shared.get(prefix)
                if block is None or not block.is_complete:
                    break
                count += 1
        return count

    def claim(self, name: BlockName, nbytes: int) -> Claim[B]:
        """A pinned copy to be filled; or, for a shared prefix, the one that is there already."""
        with self._lock:
            known = self._shared.get(name.prefix) if name.is_shared else None
            if known is not None:
                known.pins += 1
                self._shared.move_to_end(name.prefix)
                return Claim(known, is_new=False)
            dropped = self._make_room(nbytes)
            if self._live_bytes + nbytes > self._limit_bytes:
                return Claim(None, is_new=False, dropped=dropped)
            block = HostBlock(name, nbytes, self._take_buffer(nbytes))
            if name.is_shared:
                self._shared[name.prefix] = block
            return Claim(block, is_new=True, dropped=dropped)

    def pin(self, prefix: bytes) -> HostBlock[B] | None:
        """The complete shared copy, pinned."""
        with self._lock:
            block = self._shared.get(prefix)
            if block is None or not block.is_complete:
                return None
            block.pins += 1
            self._shared.move_to_end(prefix)
            return block

    def pin_again(self, block: HostBlock[B]) -> None:
        """One more pin on a copy that is pinned."""
        with self._lock:
            block.pins += 1

    def complete(self, block: HostBlock[B]) -> None:
        """All bytes are there: others may see it."""
        with self._lock:
            block.is_complete = True

    def unpin(self, blocks: Sequence[HostBlock[B]]) -> None:
        """Give up a pin on each; the end of a chain becomes the first to be evicted.

        What is private or never got complete is freed with its last pin.
        """
        with self._lock:
            for block in reversed(blocks):
                if block.pins == 0:
                    raise InvariantBroken("a host block was unpinned without a pin")
                block.pins -= 1
                if block.pins:
                    continue
                if not block.name.is_shared:
                    self._free(block)
                elif not block.is_complete:
                    del self._shared[block.name.prefix]
                    self._free(block)
                else:
                    self._shared.move_to_end(block.name.prefix)

    def drop(self, prefixes: Iterable[bytes]) -> list[bytes]:
        """Forget copies that nobody has pinned; the prefixes that went."""
        dropped = []
        with self._lock:
            for prefix in prefixes:
                block = self._shared.get(prefix)
                if block is not None and not block.pins:
                    del self._shared[prefix]
                    self._free(block)
                    dropped.append(prefix)
        return dropped

    def check(self) -> None:
        """Raises InvariantBroken if the bound is exceeded or a byte count cannot be."""
        with self._lock:
            total = self._live_bytes + self._spare_bytes
            if min(self._live_bytes, self._spare_bytes) < 0 or total > self._limit_bytes:
                raise InvariantBroken(f"host pool holds {total} of {self._limit_bytes} bytes")

    def _make_room(self, nbytes: int) -> tuple[bytes, ...]:
        """Drop copies that nobody has pinned, least recently used first, until `nbytes` fit."""
        victims: list[HostBlock[B]] = []
        excess_bytes = self._live_bytes + nbytes - self._limit_bytes
        for block in self._shared.values():
            if excess_bytes <= 0:
                break
            if not block.pins:
                victims.append(block)
                excess_bytes -= block.nbytes
        for block in victims:
            del self._shared[block.name.prefix]
            self._free(block)
        return tuple(block.name.prefix for block in victims)

    def _take_buffer(self, nbytes: int) -> B:
        self._live_bytes += nbytes
        spare = self._spare.get(nbytes)
        if spare:
            self._spare_bytes -= nbytes
            return spare.pop()
        for size, buffers in self._spare.items():
            while buffers and self._live_bytes + self._spare_bytes > self._limit_bytes:
                buffers.pop()
                self._spare_bytes -= size
        return self._make_buffer(nbytes)

    def _free(self, block: HostBlock[B]) -> None:
        self._live_bytes -= block.nbytes
        self._spare_bytes += block.nbytes
        self._spare.setdefault(block.nbytes, []).append(block.buffer)
