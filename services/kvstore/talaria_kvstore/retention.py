"""Which KV prefixes go when the host is full. Pure.

Least recently used first, and of a chain always the leaf first: a block whose parent is gone can
not be restored.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's copy of a prefix, as the retention judges it."""

    instance: str
    prefix: bytes
    parent: bytes
    nbytes: int
    last_use_s: float


def choose_evictions(candidates: Iterable[Candidate], excess_bytes: int) -> tuple[Candidate, ...]:
    """What to evict, in order, so that at least `excess_bytes` become free if that much is there.

    No prefix comes before one of its children on the same instance. Ties break by name.
    """
    if excess_bytes <= 0:
        return ()
    by_name = {(c.instance, c.prefix): c for c in candidates}
    children = Counter((c.instance, c.parent) for c in by_name.values())
    leaves = [_rank(c) for name, c in by_name.items() if not children[name]]
    heapq.heapify(leaves)
    chosen: list[Candidate] = []
    freed_bytes = 0
    while leaves and freed_bytes < excess_bytes:
        _, instance, prefix = heapq.heappop(leaves)
        candidate = by_name[instance, prefix]
        chosen.append(candidate)
        freed_bytes += candidate.nbytes
        above = (candidate.instance, candidate.parent)
        children[above] -= 1
        if above in by_name and not children[above]:
            heapq.heappush(leaves, _rank(by_name[above]))
    return tuple(chosen)


def _rank(candidate: Candidate) -> tuple[float, str, bytes]:
    return candidate.last_use_s, candidate.instance, candidate.prefix
