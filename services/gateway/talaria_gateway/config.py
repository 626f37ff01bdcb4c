"""Settings of the gateway. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=1)]


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[gateway]` of talaria.toml; times in seconds, constants of protocols 1 and 12."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """0: any free port."""

    body_bytes_max: Size = 8_000_000
    """Larger bodies are answered with 413."""
    body_silence_s: Positive = 30.0
    """A request body that stops arriving for so long is given up."""
    messages_max: Size = 10_000
    calls_max: Size = 10_000
    """Calls open at once; more are answered with 429."""

    place_timeout_s: Positive = 4.0
    place_tries: Size = 3
    accept_timeout_s: Positive = 1.0
    accept_timeout_large_s: Positive = 3.0
    """For bodies over 1 MB."""
    silence_s: Positive = 5.0
    """An accepted attempt that says nothing for so long is lost."""
    probe_after_s: Positive = 0.75
    """Without a snapshot for so long (one and a half heartbeats), an instance that holds calls is
    asked whether it is still there."""
    hold_status_s: Positive = 5.0
    """Longest time that a stream's HTTP status waits for acceptance."""
    keep_alive_s: Positive = 10.0
    """Interval of the comments that keep a silent stream open."""
    call_deadline_s: Positive = 600.0
    """A call that has not started by then is not worth starting."""

    reader_bytes_max: Size = 8_000_000
    """A reader that is further behind is cut."""
    reader_behind_s: Positive = 2.0
    drain_s: Positive = 20.0
    """Longest wait for open calls when the gateway shuts down."""
