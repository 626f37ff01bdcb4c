"""Reply subjects of one connection, below one wildcard subscription. IO (event loop).

    prefix.7        a request's answer, or a listener's inbox
    prefix.7.2      below a listener's inbox, for example its second attempt

Answers wake their request at once; listeners have a mailbox each, so that a slow one holds up
nobody and may itself make requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from talaria_common.bus import BusDown, Handler, Msg, NoResponders, RequestTimeout
from talaria_common.mailbox import Mailbox


class Publish(Protocol):
    """The connection's own publish."""

    def __call__(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Awaitable[None]: ...


class Inboxes:
    """Mints inboxes and routes what comes to them."""

    def __init__(self, prefix: str, new_mailbox: Callable[[str, Handler], Mailbox]) -> None:
        self.prefix = prefix
        self._new_mailbox = new_mailbox
        self._minted = 0
        self._requests: dict[str, asyncio.Future[Msg]] = {}
        self._listeners: dict[str, Mailbox] = {}

    def new(self) -> str:
        """A subject that was never used before."""
        self._minted += 1
        return f"{self.prefix}.{self._minted}"

    def deliver(self, message: Msg) -> None:
        """Route one message; without a request or listener it is late, and dropped."""
        request = self._requests.get(message.subject)
        if request is not None:
            if not request.done():
                request.set_result(message)
            return
        mailbox = self._listeners.get(message.subject) or self._listeners.get(
            message.subject.rpartition(".")[0]
        )
        if mailbox is not None:
            mailbox.put(message)

    def listen(self, inbox: str, handler: Handler) -> InboxSubscription:
        """Handle what comes to `inbox` or one token below it; replaces an earlier listener."""
        if not inbox.startswith(self.prefix + "."):
            raise ValueError(f"{inbox} is not an inbox of this connection")
        mailbox = self._new_mailbox(inbox, handler)
        self._listeners[inbox] = mailbox
        return InboxSubscription(self._listeners, inbox, mailbox)

    async def request(
        self,
        publish: Publish,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None,
    ) -> Msg:
        """Publish with a reply subject and wait for the first answer."""
        reply = self.new()
        sent = publish(subject, payload, reply=reply, headers=headers)
        message = await self._answer(reply, sent, subject, timeout_s)
        if message.is_no_responders:
            raise NoResponders(subject)
        return message

    async def echo(self, publish: Publish, timeout_s: float) -> None:
        """Publish to an inbox of our own and wait for it: all that was sent before has arrived."""
        inbox = self.new()
        await self._answer(inbox, publish(inbox, b""), inbox, timeout_s)

    async def _answer(
        self, reply: str, sent: Awaitable[None], subject: str, timeout_s: float
    ) -> Msg:
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._requests[reply] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await sent
                return await answer
        except TimeoutError as error:
            raise RequestTimeout(subject, timeout_s) from error
        finally:
            del self._requests[reply]

    def fail_requests(self, detail: str) -> None:
        """End every open request with `BusDown`."""
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(BusDown(detail))

    def mailboxes(self) -> list[Mailbox]:
        """Of all listeners."""
        return list(self._listeners.values())


class InboxSubscription:
    """A listener's interest in its inbox."""

    def __init__(self, listeners: dict[str, Mailbox], inbox: str, mailbox: Mailbox) -> None:
        self._listeners = listeners
        self._inbox = inbox
        self._mailbox = mailbox

    async def unsubscribe(self) -> None:
        self._mailbox.close()
        if self._listeners.get(self._inbox) is self._mailbox:
            del self._listeners[self._inbox]
