"""What every service has in common: its context, its life, the shell around its policy. IO.

    create(context) ──▶ start() ──▶ (serving) ──▶ drain() ──▶ stop()

`services/<name>/talaria_<name>/main.py` exports `create(context) -> Service`; `talaria up` and
`talaria serve <name>` run it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from talaria_common.bus import Bus
from talaria_common.clock import Clock
from talaria_common.config import Settings
from talaria_common.errors import InvariantBroken
from talaria_common.policies import PolicySet
from talaria_common.telemetry import Telemetry


@dataclass(frozen=True)
class Context:
    """What a service gets from whoever runs it."""

    member: str
    """Name of this member of the service, unique in the deployment: `gateway-1`, `i-2`."""
    settings: Settings
    policy: PolicySet
    bus: Bus
    body_bus: Bus
    """A second connection, for bodies, so that they do not delay tokens. May be the same."""
    clock: Clock
    telemetry: Telemetry
    data_dir: Path
    """Folder for what the service keeps on disk."""


class Service(Protocol):
    """One running service."""

    async def start(self) -> None:
        """Subscribe and load; returns when the service is ready."""

    async def drain(self) -> None:
        """Take no new work and let accepted work end, within a bound of its own."""

    async def stop(self) -> None:
        """End everything at once; idempotent."""


E = TypeVar("E")


_log = logging.getLogger(__name__)


class Recorder:
    """Writes (now_s, event, effects) lines for parity tests and bug reports (docs/formats.md).

    A recording that cannot be written ends; what is recorded goes on.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def write(self, now_s: float, event: Any, effects: list[Any]) -> None:
        line = {"now_s": now_s, "event": event, "effects": effects}
        if not self._file.closed:
            with self._ends_on_failure():
                self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        with self._ends_on_failure():
            self._file.close()

    @contextlib.contextmanager
    def _ends_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk, most likely
            _log.error("the recording %s ends: %s", self._file.name, error.strerror or error)
            with contextlib.suppress(OSError):  # what is still buffered has nowhere to go
                self._file.close()


class Shell(Generic[E]):
    """Applies events to a policy one at a time and performs the effects, in order.

    `step` is pure; `perform` does IO and may start tasks but neither waits nor applies an event:
    events that an effect causes come back later through the event loop.
    """

    def __init__(
        self,
        step: Callable[[Any, float], list[E]],
        perform: Callable[[E], None],
        clock: Clock,
        recorder: Recorder | None = None,
    ) -> None:
        self._step = step
        self._perform = perform
        self._clock = clock
        self._recorder = recorder
        self._is_applying = False

    def apply(self, event: Any) -> list[E]:
        """Decide about one event now and carry the decision out; the effects are returned too."""
        if self._is_applying:
            raise InvariantBroken(f"event {event!r} applied inside an effect")
        self._is_applying = True
        try:
            now_s = self._clock.now_s()
            effects = self._step(event, now_s)
            if self._recorder is not None:
                self._recorder.write(now_s, event, effects)
            for effect in effects:
                self._perform(effect)
        finally:
            self._is_applying = False
        return effects

    def close(self) -> None:
        """Flush the recording."""
        if self._recorder is not None:
            self._recorder.close()
