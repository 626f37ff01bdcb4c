"""Running until a signal comes: event loop, signals, death of the parent. IO."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import uvloop

from talaria_cli.failure import CommandFailed

T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1


class Stop:
    """Set by SIGINT or SIGTERM. A second signal cuts draining short, a third kills the process."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.signal: signal.Signals | None = None
        self._hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.event.is_set():
            # Nothing is cancelled: an interrupted clean-up would leave connections that never end.
            self._hurry.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.signal = number
        self.event.set()

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 0 after SIGTERM: a clean end."""
        return 130 if self.signal == signal.SIGINT else 0

    async def unless(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work` unless a signal comes first (then it is cancelled); whether it was done."""
        return await _race(work, self.event, None)

    async def drain(self, work: Coroutine[Any, Any, None], within_s: float) -> None:
        """Do `work` until it is done, the time is up or a second signal comes."""
        await _race(work, self._hurry, within_s)


async def _race(
    work: Coroutine[Any, Any, None], event: asyncio.Event, within_s: float | None
) -> bool:
    """Do `work` unless `event` comes or the time is up first (then it is cancelled); whether done."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, stop], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop and return its exit code."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        return 130
    except BaseExceptionGroup as group:
        raise _first(group) from group


def run_interruptible(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on uvloop; the first SIGINT or SIGTERM cancels it, and it cleans up.

    Raises KeyboardInterrupt when it was cancelled.
    """

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(cancellable())
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    except BaseExceptionGroup as group:
        raise _first(group) from group


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise CommandFailed("the process that started this one has gone")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a task group's failures."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
