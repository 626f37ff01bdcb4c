"""The bus over NATS. IO.

One wildcard inbox subscription per connection carries all answers and listeners. The connection
is made again for ever; while it is away `publish` and `request` raise `BusDown` at once, and open
requests end with it instead of waiting out their time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription as NatsSub
from nats.nuid import NUID

from talaria_common.bus import BusDown, Handler, Msg, TooLarge
from talaria_common.errors import Rejected
from talaria_common.inboxes import Inboxes, InboxSubscription
from talaria_common.mailbox import Mailbox
from talaria_common.nats_bucket import NatsBucket
from talaria_common.nats_client import NatsClient

_log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_WITHIN_S: Final = 5.0
CLOSE_WITHIN_S: Final = 5.0
BARRIER_WITHIN_S: Final = 5.0
JETSTREAM_WITHIN_S: Final = 3.0
RECONNECT_WAIT_S: Final = 0.25
PING_EVERY_S: Final = 2.0
"""Two unanswered pings end a connection: a half-open peer is found in 6 s."""
FLUSH_WITHIN_S: Final = 10.0
WARN_EVERY_S: Final = 10.0


class NatsBus:
    """A connection to NATS; make one with `connect`."""

    def __init__(self, client: NatsClient, url: str) -> None:
        self.handler_errors = 0
        self.messages_dropped = 0
        self.generation = 0
        self.inboxes = Inboxes(f"_INBOX.{NUID().next().decode()}", self._mailbox)
        self._client = client
        self._url = url
        self._jetstream = client.jetstream(timeout=JETSTREAM_WITHIN_S)
        self._subscriptions: list[NatsSubscription] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._is_up = False
        self._is_closing = False
        self._closed: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_error = "no answer"
        self._warned_s: float | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str = "talaria",
        user: str = "",
        password: str = "",
        within_s: float = CONNECT_WITHIN_S,
    ) -> NatsBus:
        """Connect. Raises `BusDown` after `within_s`, `Rejected` (unauthorised)."""
        client = NatsClient()
        bus = cls(client, _without_password(url))
        options: dict[str, Any] = {
            "name": name,
            "user": user or None,
            "password": password or None,
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_lost,
            "reconnected_cb": bus._on_back,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "connect_timeout": 2,
            "ping_interval": PING_EVERY_S,
            "max_outstanding_pings": 2,
            "flush_timeout": FLUSH_WITHIN_S,
        }
        connecting = asyncio.create_task(client.connect(url, **options))
        try:
            ends: set[asyncio.Future[Any]] = {connecting, bus._refused}
            await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if bus._refused.done():
                raise Rejected("unauthorised", f"NATS at {bus._url}: {bus._refused.result()}")
            if not connecting.done():
                raise BusDown(
                    f"no NATS server answers at {bus._url} ({bus._last_error}): "
                    "start one, or set [bus] url"
                )
            connecting.result()
            await client.subscribe(f"{bus.inboxes.prefix}.>", cb=bus._on_inbox)
        except BaseException:
            connecting.cancel()
            await asyncio.wait({connecting})
            bus._is_closing = True
            await client.close_quietly()
            raise
        bus._is_up = True
        return bus

    @property
    def is_connected(self) -> bool:
        # nats-py says "connected" before it has sent the subscriptions again.
        return self._is_up and self._client.is_connected

    @property
    def is_closed(self) -> bool:
        return self._is_closing

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
        if len(payload) > self._client.max_payload:
            raise TooLarge(len(payload), self._client.max_payload)
        try:
            await self._client.publish(
                subject, payload, reply=reply, headers=dict(headers) if headers else None
            )
        except nats.errors.MaxPayloadError as error:
            raise TooLarge(len(payload), self._client.max_payload) from error
        except nats.errors.Error as error:
            raise BusDown(f"cannot publish to {self._url}: {error}") from error

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
    ) -> NatsSubscription:
        self._check_open()
        mailbox = self._mailbox(subject, handler)

        async def receive(message: NatsMsg) -> None:
            mailbox.put(_converted(message))

        sub = await self._client.subscribe(subject, queue=queue, cb=receive)
        subscription = NatsSubscription(self._subscriptions, sub, mailbox)
        self._subscriptions.append(subscription)
        return subscription

    async def listen(self, inbox: str, handler: Handler) -> InboxSubscription:
        self._check_open()
        return self.inboxes.listen(inbox, handler)

    async def bucket(self, name: str) -> NatsBucket:
        return await NatsBucket.open(self, self._jetstream, name)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._on_reconnect.append(callback)

    async def barrier(self) -> None:
        # A flush is none: its PING overtakes buffered SUBs. A message of our own does not.
        await self.inboxes.echo(self.publish, BARRIER_WITHIN_S)

    async def while_up(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do `work`; `BusDown` as soon as the connection is lost, or if it is not there."""
        self._check_connected()
        task = asyncio.create_task(work())
        ends: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise BusDown(f"lost the connection to {self._url}")
            return task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        try:
            await self._close()
        finally:
            self._closed.set_result(None)

    async def _close(self) -> None:
        if self.is_connected:
            try:
                for subscription in self._subscriptions:
                    await self._client.end_interest(subscription.sid)
                await self.barrier()
            except (BusDown, nats.errors.Error) as error:
                _log.debug("closing without a last word: %s", error)
        mailboxes = [s.mailbox for s in self._subscriptions] + self.inboxes.mailboxes()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                for mailbox in mailboxes:
                    await mailbox.join()
                await self.barrier()
        except (TimeoutError, BusDown) as error:
            _log.debug("closing with handlers cut or messages unsent: %s", error)
            for mailbox in mailboxes:
                mailbox.abort()
        self._is_closing = True
        self._is_up = False
        self.inboxes.fail_requests("the connection was closed")
        if not self._lost.done():
            self._lost.set_result(None)
        await self._client.close_quietly()

    async def _on_inbox(self, message: NatsMsg) -> None:
        self.inboxes.deliver(_converted(message))

    async def _on_lost(self) -> None:
        if self._is_closing or not self._is_up:
            return
        self._is_up = False
        self._client.forget_unsent()
        self.inboxes.fail_requests(f"lost the connection to {self._url}")
        self._lost.set_result(None)
        _log.warning("lost the connection to NATS", extra={"url": self._url})
        self._tell(self._on_disconnect)

    async def _on_back(self) -> None:
        self._is_up = True
        self.generation += 1
        self._lost = asyncio.get_running_loop().create_future()
        _log.info("connected to NATS again", extra={"url": self._url})
        self._tell(self._on_reconnect)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if "authorization" in self._last_error.lower() and not self._refused.done():
            self._refused.set_result(self._last_error)
        if isinstance(error, nats.errors.SlowConsumerError):
            self.messages_dropped += 1
        elif not self._is_up:
            return  # one per attempt to connect; the loss has been told
        self._warn(self._last_error)

    def _warn(self, text: str) -> None:
        now_s = time.monotonic()
        if self._warned_s is None or now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("NATS: %s", text, extra={"dropped": self.messages_dropped})

    def _tell(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:  # nats-py's reconnect must not end with it
                self._count_error()
                _log.exception("connection callback failed")

    def _mailbox(self, name: str, handler: Handler) -> Mailbox:
        return Mailbox(name, handler, on_error=self._count_error, on_drop=self._count_drop)

    def _count_error(self) -> None:
        self.handler_errors += 1

    def _count_drop(self) -> None:
        self.messages_dropped += 1
        self._warn("a handler is too slow, messages are dropped")

    def _check_open(self) -> None:
        if self._is_closing:
            raise BusDown("the connection was closed")

    def _check_connected(self) -> None:
        self._check_open()
        if not self.is_connected:
            raise BusDown(f"not connected to NATS at {self._url}")


class NatsSubscription:
    """One interest."""

    def __init__(self, registry: list[NatsSubscription], sub: NatsSub, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._registry = registry
        self._sub = sub

    @property
    def sid(self) -> int:
        return self._sub._id

    async def unsubscribe(self) -> None:
        self.mailbox.close()
        if self in self._registry:
            self._registry.remove(self)
            try:
                await self._sub.unsubscribe()
            except nats.errors.Error as error:  # the connection has closed: nothing is left to end
                _log.debug("unsubscribe: %s", error)


def _converted(message: NatsMsg) -> Msg:
    headers = message.headers
    if not headers:
        return Msg(message.subject, message.data, message.reply)
    is_no_responders = headers.get("Status") == "503" and not message.data
    return Msg(message.subject, message.data, message.reply, headers, is_no_responders)


def _without_password(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
