"""A stack of its own for one replay: `talaria up` as a child process on free ports. IO."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from talaria_cli.failure import CommandFailed

READY: Final = re.compile(r"^talaria ready url=(\S+) nats=(\S+)")
START_WITHIN_S: Final = 300.0
STOP_WITHIN_S: Final = 60.0
"""Longer than a drain."""
LOG_LINES: Final = 15


class FreshStack:
    """Async context: a stack that holds nothing of an earlier run; its URLs are known inside."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        waiting: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`arguments` of `talaria up`; `waiting` is called with the seconds so far while it starts."""
        self.url = ""
        self.nats_url = ""
        self._arguments = arguments
        self._env = dict(env)
        self._waiting = waiting
        self._folder = tempfile.TemporaryDirectory(prefix="talaria-replay-")
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def log_path(self) -> Path:
        return Path(self._folder.name) / "up.log"

    async def __aenter__(self) -> FreshStack:
        command = [sys.executable, "-m", "talaria_cli.main", "up", "--port", "0"]
        command += ["--data", self._folder.name, "--parent", str(os.getpid()), *self._arguments]
        try:
            with self.log_path.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._env,
                    start_new_session=True,
                )
            self._reader = asyncio.create_task(self._read(self._process))
            await self._wait_ready(self._process)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if found := READY.match(line.decode(errors="replace")):
                self.url, self.nats_url = found[1], found[2]
                self._ready.set()
        self._ready.set()

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        start_s = time.monotonic()
        while not self._ready.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), 0.5)
            self._waiting(time.monotonic() - start_s)
            if time.monotonic() - start_s > START_WITHIN_S:
                raise CommandFailed(
                    f"the stack is not ready after {START_WITHIN_S:g} s\n{self.tail()}"
                )
        if not self.url:
            code = await process.wait()
            raise CommandFailed(
                f"the stack ended with code {code} before it was ready\n{self.tail()}"
            )

    def tail(self) -> str:
        """The last lines of the stack's log."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            return "\n".join(f"  | {line}" for line in lines[-LOG_LINES:])
        return ""

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        self._folder.cleanup()
