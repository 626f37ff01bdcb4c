"""Settings of the kvstore, `[kvstore]`. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0)]


class KvstoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the host KV of one node."""

    budget_bytes: Annotated[int, Meta(ge=0)] = 4_000_000_000
    """Host KV of all instances together; above it, prefixes are evicted."""
    evict_to_share: Share = 0.95
    """How far below the budget an eviction goes, so that not each save causes one."""
    evict_batch: Annotated[int, Meta(ge=1)] = 512
    """Most prefixes in one EvictKv."""
    evict_retry_s: Seconds = 5.0
    """Seconds after which an eviction that was not confirmed is asked for again."""
    evict_tries: Annotated[int, Meta(ge=1)] = 3
    """Unconfirmed evictions of a prefix after which it is no longer believed in: the instance's
    KvDropped got lost."""
    silent_s: Seconds = 5.0
    """Seconds without a word of an instance after which nothing is restorable there."""
    forget_s: Seconds = 60.0
    """Seconds without a word after which what it held is forgotten."""
    sweep_s: Seconds = 1.0
    """Seconds between two looks at the clock."""
