"""Settings of the router, `[router]` of talaria.toml. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds and first guesses, with their units."""

    stale_s: Positive = 1.5
    """Snapshot age (3 periods of 0.5 s) from which an instance is not ranked."""
    gone_s: Positive = 5.0
    """Snapshot age from which it is no home either."""
    probe_after_s: Positive = 0.75
    """Silence after which an instance is asked for a snapshot; no responders: it is gone."""

    tokens_per_byte: Positive = 0.27
    """Until a model's usage tells: English and code with a 49k vocabulary."""
    output_tokens: Annotated[int, Meta(ge=1)] = 128
    """Expected output of a call that states no limit."""

    admit_answer_s: Positive = 1.0
    """Wait for admission's answer before the same question is sent again."""
    admit_retry_s: Positive = 0.2
    """Pause when nobody answers for admission."""
    admit_within_s: Positive = 3.0
    """After this the call gets no place: below the gateway's 4 s."""
    placing_max: Annotated[int, Meta(ge=1)] = 1024
    """Calls being placed at once; above, they are turned away as overloaded."""
    ready_within_s: Annotated[float, Meta(ge=0)] = 1.0
    """Longest wait for a first snapshot and the session table at start."""
    sessions_max: Annotated[int, Meta(ge=1)] = 50_000
    """Sessions whose instance is remembered."""
