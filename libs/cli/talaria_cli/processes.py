"""One child process per service: started, watched, restarted with a back-off, stopped. IO.

A child is `talaria serve NAME --member MEMBER ...` in a session of its own, so that a
terminal's Ctrl-C reaches only the supervisor, which then stops its children in order. A child
dies with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from talaria_cli.deployment import Deployment
from talaria_cli.failure import CommandFailed
from talaria_cli.stack import DRAIN_ORDER

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 10.0
STEADY_S: Final = 30.0
"""A child that lived for so long starts again with the first back-off."""
STOP_S: Final = 45.0
"""From SIGTERM to SIGKILL; longer than a service drains."""
SERVING: Final = b"talaria serving "
"""First words of the line by which a child says that it is ready."""

_log = logging.getLogger(__name__)


class Child:
    """One supervised service process."""

    def __init__(self, name: str, member: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        self.member = member
        self.ready = asyncio.Event()
        self._command = command
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    async def keep_running(self) -> None:
        """Run the child until it is stopped. Raises `CommandFailed` if it ends before its first ready."""
        backoff_s = BACKOFF_FIRST_S
        while not self._is_stopping:
            started_s = time.monotonic()
            code = await self._run_once()
            if self._is_stopping:
                return
            if not self.ready.is_set():
                raise CommandFailed(f"{self.member} ended with code {code} before it was ready")
            if time.monotonic() - started_s > STEADY_S:
                backoff_s = BACKOFF_FIRST_S
            _log.warning(
                "a service has ended and is started again",
                extra={"member": self.member, "code": code, "after_s": backoff_s},
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, env=self._env, start_new_session=True
        )
        self._process = process
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if line.startswith(SERVING):
                    self.ready.set()
            return await process.wait()
        except asyncio.CancelledError:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it does not end in time; idempotent."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # A stopped child (SIGSTOP) must be able to see the signal.
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            _log.warning("a service did not stop in time", extra={"member": self.member})
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Supervisor:
    """The children of a deployment."""

    def __init__(self, deployment: Deployment, nats_url: str) -> None:
        self._deployment = deployment
        self._nats_url = nats_url
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, wanted: list[tuple[str, str]]) -> None:
        """Start all and wait until each is ready; the first failure ends the start."""
        config = self._deployment.write()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TALARIA_")}
        env |= self._deployment.env
        for name, member in wanted:
            command = self._command(name, member, config)
            self._children.append(Child(name, member, command, env))
        self._tasks = [asyncio.create_task(child.keep_running()) for child in self._children]
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            ready.cancel()

    def _command(self, name: str, member: str, config: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "talaria_cli.main", "serve", name),
            *("--member", member, "--nats-url", self._nats_url),
            *("--config", str(config), "--data", str(self._deployment.data_dir)),
            *("--parent", str(os.getpid())),
        ]

    async def _all_ready(self) -> None:
        for child in self._children:
            await child.ready.wait()

    async def drain(self) -> None:
        """Stop the children in order, front door first: each lets its accepted work end."""
        for name in DRAIN_ORDER:
            await asyncio.gather(*(child.stop() for child in self._children if child.name == name))

    async def stop(self) -> None:
        """End whatever still runs."""
        for child in self._children:
            await child.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
