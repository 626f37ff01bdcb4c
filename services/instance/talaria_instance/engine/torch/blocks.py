"""Device KV blocks of the active model: ownership, prefix reuse, pins. Pure.

    free ──allocate──▶ owned ──release──▶ cached, if it was published, else free
                         ▲──── share ───────┘  evicted least recently used first

A pin is no ownership: it only keeps a block that is being copied from being handed out again.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from talaria_common.errors import InvariantBroken

DIGEST_BYTES = 16


def root_digest(tenant: str, identity: bytes) -> bytes:
    """Start of every chain of one tenant on one model: prefixes are never shared across tenants."""
    salt = len(tenant.encode()).to_bytes(4, "big") + tenant.encode()
    return hashlib.blake2b(salt + identity, digest_size=DIGEST_BYTES).digest()


def next_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Cumulative digest of a full block of tokens after `parent`."""
    body = parent + array("q", tokens).tobytes()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def extend_chain(
    digests: list[bytes], root: bytes, tokens: Sequence[int], block_tokens: int
) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` lacks."""
    for n in range(len(digests), len(tokens) // block_tokens):
        parent = digests[n - 1] if n else root
        digests.append(next_digest(parent, tokens[n * block_tokens : (n + 1) * block_tokens]))


class BlockPool:
    """All KV blocks of one layout of the arena."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._owners = [0] * total
        self._pins = [0] * total
        self._prefix: list[bytes | None] = [None] * total
        self._block: dict[bytes, int] = {}
        self._free = list(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owned = 0

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def unowned(self) -> int:
        """Blocks that no sequence owns: available now, or as soon as their copy has ended."""
        return self.total - self._owned

    @property
    def is_pinned(self) -> bool:
        """Some block is held back by a pin alone."""
        return any(p and not o for p, o in zip(self._pins, self._owners, strict=True))

    def cached_blocks(self, prefixes: Sequence[bytes]) -> int:
        """How many leading blocks of the chain are on the device; changes nothing."""
        count = 0
        for prefix in prefixes:
            if prefix not in self._block:
                break
            count += 1
        return count

    def allocate(self, count: int) -> list[int] | None:
        """Own `count` blocks, low addresses first; None (and nothing taken) if there are fewer."""
        if count > self.available:
            return None
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._own(block)
            taken.append(block)
        return taken

    def share(self, prefixes: Sequence[bytes]) -> list[int]:
        """Own one more time the blocks of the longest known prefix of the chain."""
        blocks = [self._block[p] for p in prefixes[: self.cached_blocks(prefixes)]]
        for block in blocks:
            self._own(block)
        return blocks

    def publish(self, block: int, prefix: bytes) -> int:
        """Make a full, computed block reusable; the block that stands for the prefix from now on.

        That is another one when the prefix is already known: `block` is then released.
        """
        known = self._block.get(prefix)
        if known == block:
            return block
        if known is None:
            self._forget(block)
            self._block[prefix] = block
            self._prefix[block] = prefix
            return block
        self._own(known)
        self.release((block,))
        return known

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each; the end of a chain becomes the first to be evicted."""
        for block in reversed(blocks):
            if self._owners[block] == 0:
                raise InvariantBroken(f"block {block} was released without an owner")
            self._owners[block] -= 1
            self._owned -= not self._owners[block]
            self._settle(block)

    def pin(self, block: int) -> None:
        """A copy of the block is under way."""
        self._pins[block] += 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """Copies of the blocks have ended."""
        for block in blocks:
            if self._pins[block] == 0:
                raise InvariantBroken(f"block {block} was unpinned without a pin")
            self._pins[block] -= 1
            self._settle(block)

    def check(self) -> None:
        """Raises InvariantBroken unless each block is in exactly one state."""
        free, cached = set(self._free), set(self._cached)
        if self._owned != sum(owners > 0 for owners in self._owners):
            raise InvariantBroken("the count of owned blocks is wrong")
        for block in range(self.total):
            is_idle = not self._owners[block] and not self._pins[block]
            if is_idle != (block in free or block in cached) or (block in free and block in cached):
                raise InvariantBroken(f"block {block} is in two states or none")
            if block in free and self._prefix[block] is not None:
                raise InvariantBroken(f"free block {block} has a prefix")
        for prefix, block in self._block.items():
            if self._prefix[block] != prefix:
                raise InvariantBroken(f"block {block} stands for a prefix that it does not know")

    def _own(self, block: int) -> None:
        self._cached.pop(block, None)
        self._owned += not self._owners[block]
        self._owners[block] += 1

    def _settle(self, block: int) -> None:
        if self._owners[block] or self._pins[block]:
            return
        if self._prefix[block] is None:
            heapq.heappush(self._free, block)
        else:
            self._cached[block] = None
            self._cached.move_to_end(block)

    def _forget(self, block: int) -> None:
        prefix = self._prefix[block]
        if prefix is not None:
            self._prefix[block] = None
            del self._block[prefix]
