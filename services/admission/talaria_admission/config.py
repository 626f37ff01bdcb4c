"""Settings of admission, `[admission]` of talaria.toml. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds and periods, with their units."""

    queue_wait_max_s: Positive = 60.0
    """Predicted wait above which new sessions are rejected; continuations wait up to twice that."""
    queued_calls_max: Annotated[int, Meta(ge=1)] = 256
    queued_bytes_max: Annotated[int, Meta(ge=1)] = 512 * 2**20
    """Per instance, like the wait and the calls."""

    accept_timeout_s: Positive = 1.0
    """How long a gateway waits for Accepted; a grant that is listed nowhere is void 1 s later."""
    accept_timeout_large_s: Positive = 3.0
    large_body_bytes: Annotated[int, Meta(ge=1)] = 2**20
    """Prompts above this size get the longer timeout: their bodies travel in parts."""

    stale_s: Positive = 1.5
    """Snapshot age (3 periods of 0.5 s) from which only live leases are honoured."""
    gone_s: Positive = 5.0
    """Snapshot age from which the instance is gone and its grants are closed."""
    rebuild_s: Annotated[float, Meta(ge=0)] = 1.0
    """Longest wait for snapshots before the first decision."""

    tombstone_s: Positive = 60.0
    """How long cancelled and ended calls are remembered."""
    cancel_repeat_s: Positive = 0.5
    load_period_s: Positive = 0.05
    """Mean time between two published accounts under load (20/s)."""
    load_burst: Annotated[int, Meta(ge=1)] = 8
    """Accounts that may follow each other at once: sessions that start together must be spread."""
    load_heartbeat_s: Positive = 1.0
    """Most time between two: routers that start later hear of it."""
    sweep_s: Positive = 0.25

    session_idle_s: Positive = 300.0
    """A session without a call for this long is over."""
    session_settle_s: Positive = 5.0
    """How long a closed session waits for the front door's account of its last calls."""
    session_keep_s: Positive = 600.0
    """How long a closed session stays in lists."""
    sessions_max: Annotated[int, Meta(ge=1)] = 20_000
    """Open sessions; above, the longest idle one is closed."""
    closed_sessions_max: Annotated[int, Meta(ge=1)] = 2_000
    backup_period_s: Positive = 0.2
    """Rows are written to the bucket in batches this far apart."""
