"""The message bus: NATS, and an in-memory one with the same contract test. IO.

Services depend on `Bus` alone. What both kinds promise:

- Handlers are called one after the other per subscription, in the order of publication by one
  publisher. A handler must return soon: it hands long work to a task of its own.
- A handler that raises is counted and logged; the subscription lives on.
- `publish` with a reply subject that nobody listens on brings one message with `is_no_responders`
  to that reply subject's own subscribers (the publisher's), never an exception.
- `request` raises `NoResponders` at once, `RequestTimeout` after `timeout_s`.
- `barrier` returns once every earlier `subscribe` of this connection is seen by other clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec

from talaria_common.errors import Rejected, Unavailable

PAYLOAD_BYTES_MAX: Final = 8 * 2**20
"""Largest message; the server's default of 1 MB is less than a prompt of 200k tokens."""


class NoResponders(Unavailable):
    """Nobody listens on the subject."""

    def __init__(self, subject: str) -> None:
        super().__init__("no_instance", f"no responders on {subject}")


class RequestTimeout(Unavailable):
    """No answer in time; whether the other side acted is unknown."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__("instance_unreachable", f"no answer on {subject} within {timeout_s:g} s")


class BusDown(Unavailable):
    """The connection is down (it is being re-established)."""

    def __init__(self, detail: str) -> None:
        super().__init__("bus_down", detail, retry_after_s=1.0)


class TooLarge(Rejected):
    """The message is over the bus's limit."""

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__("too_large", f"message of {nbytes} bytes; the bus carries {limit}")


class Msg(msgspec.Struct, frozen=True):
    """A received message."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] = {}
    is_no_responders: bool = False


Handler = Callable[[Msg], Awaitable[None]]


class Subscription(Protocol):
    """One interest; `unsubscribe` is idempotent."""

    async def unsubscribe(self) -> None: ...


class KvChange(msgspec.Struct, frozen=True):
    """A change in a bucket; `value` is None when the key was deleted."""

    key: str
    value: bytes | None
    revision: int


class Bucket(Protocol):
    """A key-value bucket with revisions."""

    async def get(self, key: str) -> KvChange | None:
        """The latest value, or None."""

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        """Write and return the new revision; with `revision`, only if it is still the latest
        (0: the key must not exist). Raises `WrongRevision`."""

    async def delete(self, key: str) -> None: ...

    def watch(self) -> AsyncIterator[KvChange | None]:
        """All current values, then None once, then changes as they come; for ever."""


class WrongRevision(Unavailable):
    """A compare-and-set lost."""

    def __init__(self, key: str) -> None:
        super().__init__("internal", f"revision of {key} has moved on")


class Bus(Protocol):
    """A connection to the bus."""

    @property
    def is_connected(self) -> bool: ...

    def new_inbox(self) -> str:
        """A fresh subject that only this connection listens on, below one wildcard subscription."""

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Fire and forget. Raises `BusDown` at once when not connected, `TooLarge`."""

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """One answer. Raises `NoResponders`, `RequestTimeout`, `BusDown`."""

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Interest in a subject (wildcards `*` and `>`); with `queue`, one member gets each message."""

    async def listen(self, inbox: str, handler: Handler) -> Subscription:
        """Handle messages to an inbox of `new_inbox` or to `inbox.*` below it; costs no round trip."""

    async def bucket(self, name: str) -> Bucket:
        """A key-value bucket on file storage, created if it is not there."""

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Called (from the event loop) each time the connection is lost."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called after the connection is back and all subscriptions stand."""

    async def barrier(self) -> None: ...

    async def close(self) -> None:
        """Stop subscriptions, let handlers end, send what is buffered, disconnect. Idempotent."""
