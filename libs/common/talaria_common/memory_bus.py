"""The bus within one process and event loop, for tests and the simulator. IO (event loop).

Same contract as NATS (tests/integration/test_bus_contract.py). Deterministic: subscribers get a
message in the order in which they subscribed, members of a queue group take turns.
`MemoryBroker.down()` and `up()` play the loss and the return of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from talaria_common.bus import (
    PAYLOAD_BYTES_MAX,
    BusDown,
    Handler,
    KvChange,
    Msg,
    TooLarge,
    WrongRevision,
)
from talaria_common.inboxes import Inboxes, InboxSubscription
from talaria_common.mailbox import Mailbox

CLOSE_WITHIN_S: Final = 5.0


class MemoryBroker:
    """What a nats-server is to NATS."""

    def __init__(self) -> None:
        self.is_up = True
        self._connected = 0
        self._buses: dict[str, MemoryBus] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._turns: dict[tuple[str, str], int] = {}
        self._buckets: dict[str, MemoryBucket] = {}

    def connect(self, name: str = "") -> MemoryBus:
        """A new connection."""
        self._connected += 1
        bus = MemoryBus(self, f"_INBOX.{name or 'c'}-{self._connected}")
        self._buses[bus.inbox_prefix] = bus
        return bus

    def down(self) -> None:
        """Lose all connections; what is published meanwhile is refused."""
        if self.is_up:
            self.is_up = False
            for bus in list(self._buses.values()):
                bus.connection_lost()

    def up(self) -> None:
        """Take all connections back, with their subscriptions."""
        if not self.is_up:
            self.is_up = True
            for bus in list(self._buses.values()):
                bus.connection_back()

    def route(self, message: Msg) -> bool:
        """Deliver to all who are interested; False if nobody is."""
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        is_heard = False
        for subscription in self._subscriptions:
            if not subscription.matches(message.subject):
                continue
            if subscription.queue:
                group = (subscription.subject, subscription.queue)
                groups.setdefault(group, []).append(subscription)
            else:
                subscription.mailbox.put(message)
                is_heard = True
        for group, members in groups.items():
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            members[turn % len(members)].mailbox.put(message)
            is_heard = True
        owner = self._buses.get(message.subject[: message.subject.find(".", len("_INBOX."))])
        if owner is not None:
            owner.inboxes.deliver(message)
            is_heard = True
        return is_heard

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def forget(self, bus: MemoryBus) -> None:
        """A connection has closed."""
        self._buses.pop(bus.inbox_prefix, None)

    def bucket(self, name: str) -> MemoryBucket:
        """The bucket, created if it is not there."""
        return self._buckets.setdefault(name, MemoryBucket(self))


class MemorySubscription:
    """One interest."""

    def __init__(self, broker: MemoryBroker, subject: str, queue: str, mailbox: Mailbox) -> None:
        self.subject = subject
        self.queue = queue
        self.mailbox = mailbox
        self._broker = broker
        self._tokens = subject.split(".")
        self._is_plain = not {"*", ">"} & set(self._tokens)

    def matches(self, subject: str) -> bool:
        """NATS' rule: `*` is one token, a last `>` one or more."""
        if self._is_plain:
            return subject == self.subject
        tokens = subject.split(".")
        for n, wanted in enumerate(self._tokens):
            if wanted == ">":
                return len(tokens) > n
            if n >= len(tokens) or wanted not in ("*", tokens[n]):
                return False
        return len(tokens) == len(self._tokens)

    async def unsubscribe(self) -> None:
        self._broker.remove(self)
        self.mailbox.close()


class MemoryBus:
    """A connection to a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, inbox_prefix: str) -> None:
        self.inbox_prefix = inbox_prefix
        self.handler_errors = 0
        self.messages_dropped = 0
        self.inboxes = Inboxes(inbox_prefix, self._mailbox)
        self._broker = broker
        self._subscriptions: list[MemorySubscription] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._broker.is_up and not self._is_closed

    def new_inbox(self) -> str:
        return self.inboxes.new()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._check_connected()
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise TooLarge(len(payload), PAYLOAD_BYTES_MAX)
        message = Msg(subject, payload, reply, dict(headers or {}))
        if not self._broker.route(message) and reply:
            self.inboxes.deliver(Msg(reply, b"", is_no_responders=True))

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        return await self.inboxes.request(self.publish, subject, payload, timeout_s, headers)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = ""
    ) -> MemorySubscription:
        self._check_open()
        mailbox = self._mailbox(subject, handler)
        subscription = MemorySubscription(self._broker, subject, queue, mailbox)
        self._subscriptions.append(subscription)
        self._broker.add(subscription)
        return subscription

    async def listen(self, inbox: str, handler: Handler) -> InboxSubscription:
        self._check_open()
        return self.inboxes.listen(inbox, handler)

    async def bucket(self, name: str) -> MemoryBucket:
        self._check_connected()
        return self._broker.bucket(name)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    async def barrier(self) -> None:
        self._check_connected()

    async def close(self) -> None:
        if self._is_closed:
            return
        for subscription in self._subscriptions:
            self._broker.remove(subscription)
        mailboxes = [s.mailbox for s in self._subscriptions] + self.inboxes.mailboxes()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                for mailbox in mailboxes:
                    await mailbox.join()
        except TimeoutError:
            for mailbox in mailboxes:
                mailbox.abort()
        self._is_closed = True
        self._broker.forget(self)
        self.inboxes.fail_requests("the connection was closed")

    def connection_lost(self) -> None:
        """The broker has gone down."""
        self.inboxes.fail_requests("the bus is down")
        for callback in self._on_disconnect:
            callback()

    def connection_back(self) -> None:
        """The broker is up again."""
        for callback in self._on_reconnect:
            callback()

    def _mailbox(self, name: str, handler: Handler) -> Mailbox:
        return Mailbox(name, handler, on_error=self._count_error, on_drop=self._count_drop)

    def _count_error(self) -> None:
        self.handler_errors += 1

    def _count_drop(self) -> None:
        self.messages_dropped += 1

    def _check_open(self) -> None:
        if self._is_closed:
            raise BusDown("the connection was closed")

    def _check_connected(self) -> None:
        self._check_open()
        if not self._broker.is_up:
            raise BusDown("the bus is down")


class MemoryBucket:
    """Keys, values and one counter of revisions."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._latest: dict[str, KvChange] = {}
        self._revision = 0
        self._watchers: list[asyncio.Queue[KvChange]] = []

    async def get(self, key: str) -> KvChange | None:
        self._check_up()
        return self._latest.get(key)

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        self._check_up()
        held = self._latest.get(key)
        if revision is not None and revision != (held.revision if held else 0):
            raise WrongRevision(key)
        return self._change(key, value)

    async def delete(self, key: str) -> None:
        self._check_up()
        if key in self._latest:
            self._change(key, None)

    async def watch(self) -> AsyncIterator[KvChange | None]:
        changes: asyncio.Queue[KvChange] = asyncio.Queue()
        current = list(self._latest.values())
        self._watchers.append(changes)
        try:
            for change in current:
                yield change
            yield None
            while True:
                yield await changes.get()
        finally:
            self._watchers.remove(changes)

    def _change(self, key: str, value: bytes | None) -> int:
        self._revision += 1
        change = KvChange(key, value, self._revision)
        if value is None:
            del self._latest[key]
        else:
            self._latest[key] = change
        for watcher in self._watchers:
            watcher.put_nowait(change)
        return self._revision

    def _check_up(self) -> None:
        if not self._broker.is_up:
            raise BusDown("the bus is down")
