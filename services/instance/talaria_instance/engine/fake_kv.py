"""Where the fake engine's KV is: block hashes, the device's cache, the host's pool. Pure.

There are no bytes behind a block; what a real engine could reuse is what these tables hold.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from talaria_instance.engine.fake_text import TOKEN_BYTES
from talaria_instance.engine.protocol import KvBlock


def root_hash(model: str, tenant: str) -> bytes:
    """Parent of a prompt's first block: nothing is shared between models or tenants."""
    return _digest(b"talaria-fake", model.encode() + b"\xff" + tenant.encode(errors="replace"))


def extend_hashes(
    root: bytes, hashes: list[bytes], tokens: bytes | bytearray, blocks: int, block_tokens: int
) -> None:
    """Append the cumulative hashes of the first `blocks` blocks of `tokens` that `hashes` lacks."""
    width = block_tokens * TOKEN_BYTES
    for n in range(len(hashes), blocks):
        parent = hashes[-1] if hashes else root
        hashes.append(_digest(parent, tokens[n * width : (n + 1) * width]))


def held_blocks(hashes: Sequence[bytes], held: Container[bytes]) -> int:
    """Leading blocks that are all in `held`."""
    return next((n for n, block in enumerate(hashes) if block not in held), len(hashes))


def _digest(parent: bytes, data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(parent + data, digest_size=16).digest()


class DeviceCache:
    """Blocks of the active model: in use by sequences, or idle and evictable."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._uses or block in self._idle

    def take(self, blocks: Iterable[bytes]) -> None:
        """Use blocks; those that are not there are there from now on."""
        for block in blocks:
            self._idle.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1

    def release(self, blocks: Sequence[bytes]) -> None:
        """End a use; a chain's leaf becomes the first to be evicted."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._idle[block] = None

    def trim(self, idle_max: int) -> None:
        """Evict idle blocks, least recently used first, down to `idle_max`."""
        while len(self._idle) > max(idle_max, 0):
            self._idle.popitem(last=False)

    def clear(self) -> None:
        self._uses.clear()
        self._idle.clear()


class HostPool:
    """Blocks with a complete host copy, bounded in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[bytes, KvBlock] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._blocks

    def save(self, chain: Sequence[KvBlock]) -> tuple[list[KvBlock], list[bytes]]:
        """Hold a chain, as much of its start as fits: the new blocks, and the evicted ones."""
        kept: list[KvBlock] = []
        size = 0
        for block in chain:
            size += block.nbytes
            if size > self._bytes_max:
                break
            kept.append(block)
        added = [block for block in kept if block.prefix not in self._blocks]
        for block in added:
            self._blocks[block.prefix] = block
            self.nbytes += block.nbytes
        self.touch([block.prefix for block in kept])
        evicted: list[bytes] = []
        while self.nbytes > self._bytes_max:
            prefix, block = self._blocks.popitem(last=False)
            self.nbytes -= block.nbytes
            evicted.append(prefix)
        return added, evicted

    def touch(self, chain: Sequence[bytes]) -> None:
        """Mark a chain as used now, its root last to go."""
        for prefix in reversed(chain):
            if prefix in self._blocks:
                self._blocks.move_to_end(prefix)

    def drop(self, prefixes: Iterable[bytes]) -> list[bytes]:
        """Forget blocks and those that only they lead to; returns what is gone."""
        doomed = set(prefixes)
        # A chain's root is always younger than its leaf, so one pass backwards finds all orphans.
        for block in reversed(self._blocks.values()):
            if block.parent in doomed:
                doomed.add(block.prefix)
        dropped = [prefix for prefix in self._blocks if prefix in doomed]
        for prefix in dropped:
            self.nbytes -= self._blocks.pop(prefix).nbytes
        return dropped
