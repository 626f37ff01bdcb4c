"""Drives the engine as the scheduler decides: one command at a time. IO (engine, timers)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias, assert_never

from talaria_common.clock import Clock
from talaria_instance.engine.protocol import Engine
from talaria_instance.events import Activate, CommandFailed, Event, Run, Stepped, Switched, Tick
from talaria_instance.sink import LoopSink

_log = logging.getLogger(__name__)

Command: TypeAlias = Activate | Run


class EngineDriver:
    """Carries out Activate and Run and sends their outcome back as events."""

    def __init__(
        self,
        engine: Engine,
        sink: LoopSink,
        clock: Clock,
        *,
        on_event: Callable[[Event], None],
        on_failure: Callable[[str, str], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        """`on_failure` hears (model, detail) before CommandFailed; `on_broken` of a bug of ours."""
        self._engine = engine
        self._sink = sink
        self._clock = clock
        self._on_event = on_event
        self._on_failure = on_failure
        self._on_broken = on_broken
        self._commands: asyncio.Queue[Command] = asyncio.Queue(1)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since_s: float | None = None

    def start(self) -> None:
        """Begin to carry out commands."""
        self._task = asyncio.create_task(self._work(), name="engine driver")

    async def close(self) -> None:
        """Stop; a command under way is abandoned. Idempotent."""
        self.cancel_wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def command(self, command: Command) -> None:
        """Carry out a command; the scheduler has at most one outstanding."""
        self._commands.put_nowait(command)

    def busy_s(self, now_s: float) -> float:
        """How long the command under way has taken so far."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def wake_at(self, at_s: float) -> None:
        """Send a Tick at this time; replaces an earlier one."""
        self.cancel_wake()
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def cancel_wake(self) -> None:
        """Send no Tick."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._apply(Tick())

    async def _work(self) -> None:
        while True:
            command = await self._commands.get()
            self._since_s = self._clock.now_s()
            event = await self._outcome(command)
            self._since_s = None
            self._sink.drain()
            self._apply(event)

    async def _outcome(self, command: Command) -> Event:
        try:
            match command:
                case Activate(model=model):
                    return Switched(record=await self._engine.activate(model))
                case Run(quantum=quantum):
                    return Stepped(report=await self._engine.run(quantum))
                case _:
                    assert_never(command)
        except Exception as error:  # whatever an engine raises, its calls end and the rest goes on
            model = command.model if isinstance(command, Activate) else command.quantum.model
            _log.exception("the engine failed", extra={"model": model})
            self._sink.drain()
            self._on_failure(model, str(error) or type(error).__name__)
            return CommandFailed()

    def _apply(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception as error:  # the state is no longer trusted
            self._on_broken(error)
