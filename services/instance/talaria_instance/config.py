"""Settings of an instance. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from talaria_instance.rounds import SchedulerConfig

Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class InstanceConfig(SchedulerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[instance]`: the scheduler's constants and the service's own.

    The engines' settings are `[instance.torch]` and `[instance.fake]`.
    """

    engine: Literal["auto", "torch", "fake"] = "auto"
    """auto: the one that the models of the catalogue name."""
    torch: dict[str, Any] = msgspec.field(default_factory=dict)
    """The torch engine's settings, see its config module."""
    fake: dict[str, Any] = msgspec.field(default_factory=dict)
    """The fake engine's settings, see its module."""

    queued_calls_max: AtLeastOne = 512
    """Calls that wait; above, runs are refused as `full`: twice what admission gives new sessions."""
    queued_bytes_max: AtLeastOne = 2**30
    """Bytes of the bodies that wait; twice admission's, too."""
    body_wait_s: Positive = 3.0
    """Wait for the last parts of a large body."""
    drain_s: Positive = 30.0
    """Time that accepted calls get to end when the instance drains."""
    tombstone_s: Positive = 60.0
    """How long a cancelled attempt is remembered."""
    ended_kept_s: Positive = 10.0
    """How long an ended attempt is listed in snapshots."""
    outcomes_max: AtLeastOne = 10_000
    """Answers remembered for repeated runs."""

    snapshot_every_s: Positive = 0.5
    """Heartbeat."""
    snapshot_gap_s: Positive = 0.1
    """Least time between two snapshots."""
    prefixes_max: AtLeastOne = 256
    """Sessions whose last prompt is reported as a held prefix."""
    coalesce_s: Positive = 0.015
    """Tokens of one stream within this time travel in one message."""
    working_every_s: Positive = 0.8
    """Longest silence of a stream."""
    engine_silent_s: Positive = 60.0
    """An engine command that takes longer makes the instance not ready."""
