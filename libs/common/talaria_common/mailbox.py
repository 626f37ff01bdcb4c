"""Serial delivery to one handler. IO (event loop).

Both kinds of bus deliver through it: messages are handled one after the other, in the order of
arrival; a handler that raises, or that lets the cancellation of something it waited for escape,
is counted and logged, and the next message is handled all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from talaria_common.bus import BusDown, Handler, Msg

_log = logging.getLogger(__name__)

MESSAGES_MAX: Final = 65_536
"""As many as a second of the busiest measured stream (41-66 k messages/s)."""
BYTES_MAX: Final = 128 * 2**20


class Mailbox:
    """A bounded queue with a handler; a task exists only while messages wait."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        *,
        on_error: Callable[[], None] = lambda: None,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._handler = handler
        self._on_error = on_error
        self._on_drop = on_drop
        self._waiting: deque[Msg] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, message: Msg) -> None:
        """Queue a message; above the bounds it is dropped and counted (readers see a gap in seq)."""
        if self._is_closed:
            return
        if len(self._waiting) >= MESSAGES_MAX or self._bytes + len(message.payload) > BYTES_MAX:
            self._on_drop()
            return
        self._waiting.append(message)
        self._bytes += len(message.payload)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=f"mailbox {self._name}")

    async def join(self) -> None:
        """Wait until the queue is empty and the handler has returned."""
        while self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Forget what waits; a handler that runs may end."""
        self._is_closed = True
        self._waiting.clear()
        self._bytes = 0

    def abort(self) -> None:
        """Close, and cancel a handler that runs."""
        self.close()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def _work(self) -> None:
        try:
            while self._waiting:
                message = self._waiting.popleft()
                self._bytes -= len(message.payload)
                await self._handle(message)
        finally:
            self._task = None

    async def _handle(self, message: Msg) -> None:
        try:
            await self._handler(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._report(message)
        except BusDown as error:  # an answer that cannot go out; the loss itself has been told
            self._on_error()
            _log.debug("handler lost the bus: %s", error, extra={"subject": message.subject})
        except Exception:  # the one place where a handler's mistakes end
            self._report(message)

    def _report(self, message: Msg) -> None:
        self._on_error()
        _log.exception("handler failed", extra={"subject": message.subject})
