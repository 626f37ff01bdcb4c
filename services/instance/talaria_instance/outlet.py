"""What goes out: token streams, numbered and coalesced, and everything else, in order. IO (bus).

    opened ──▶ Working* ──▶ Delta* ──▶ Ended

One task publishes. Each stream message carries a reply subject: when nobody listens on the inbox
any more, the server says so there, and the call's client has left (protocols 12).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from talaria_common import subjects
from talaria_common.bus import Bus, Msg, Subscription
from talaria_common.clock import Clock
from talaria_common.errors import TalariaError
from talaria_common.wire import (
    CallEnded,
    CallKey,
    Delta,
    Encoding,
    Ended,
    FirstToken,
    Message,
    ToolDelta,
    Working,
    encode,
    encode_as,
)

WorkingState: TypeAlias = Literal["queued", "paused", "running"]

_log = logging.getLogger(__name__)

POSTS_MAX: Final = 10_000
"""Messages beside the streams that wait for the bus; the oldest give way (snapshots list the ends)."""


@dataclass(eq=False)
class Stream:
    """One caller's inbox."""

    key: CallKey
    inbox: str
    encoding: Encoding
    notify: str
    reply: str
    listener: Subscription
    sent_s: float
    seq: int = 0
    text: list[str] = field(default_factory=list)
    tool_calls: list[ToolDelta] = field(default_factory=list)
    tokens: int = 0
    has_output: bool = False
    is_first: bool = False
    """FirstToken is to be told to `notify`."""
    sign: WorkingState | None = None
    """A sign of life is due."""
    final: tuple[CallEnded, Ended] | None = None

    def take(self) -> Delta | Working | None:
        """What has gathered since the last message: output, else a sign of life."""
        sign, self.sign = self.sign, None
        if self.text or self.tool_calls or self.tokens:
            self.seq += 1
            delta = Delta(
                key=self.key,
                seq=self.seq,
                text="".join(self.text),
                tool_calls=tuple(self.tool_calls),
                tokens=self.tokens,
            )
            self.text.clear()
            self.tool_calls.clear()
            self.tokens = 0
            return delta
        if sign is None or self.final is not None:
            return None
        self.seq += 1
        return Working(key=self.key, seq=self.seq, state=sign)


class Outlet:
    """Publishes for one instance; first and last messages of a stream do not wait for others."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        coalesce_s: float,
        working_every_s: float,
        on_gone: Callable[[CallKey], None],
    ) -> None:
        """`on_gone` hears of a stream that nobody listens to any more."""
        self._bus = bus
        self._clock = clock
        self._coalesce_s = coalesce_s
        self._working_every_s = working_every_s
        self._on_gone = on_gone
        self._streams: dict[CallKey, Stream] = {}
        self._dirty: dict[CallKey, Stream] = {}
        self._posts: deque[tuple[str, bytes]] = deque(maxlen=POSTS_MAX)
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._work(), name="outlet")

    async def close(self) -> None:
        """Send what has gathered and stop; idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        await self._flush()
        for stream in self._streams.values():
            await stream.listener.unsubscribe()
        self._streams.clear()

    # --- streams --------------------------------------------------------------------------------

    async def listen(self, key: CallKey) -> tuple[str, Subscription]:
        """A reply subject on which the bus can say that a stream has no reader."""
        reply = self._bus.new_inbox()

        async def on_reply(message: Msg) -> None:
            if message.is_no_responders and key in self._streams:
                self._on_gone(key)

        return reply, await self._bus.listen(reply, on_reply)

    def open(
        self,
        key: CallKey,
        inbox: str,
        encoding: Encoding,
        notify: str,
        listening: tuple[str, Subscription],
    ) -> None:
        """Begin a call's stream."""
        reply, listener = listening
        now_s = self._clock.now_s()
        stream = Stream(key, inbox, encoding, notify, reply, listener, sent_s=now_s)
        self._streams[key] = stream

    def first_token(self, key: CallKey) -> None:
        """Tell the placing gateway, if the inbox is not its own."""
        stream = self._streams.get(key)
        if stream is not None and stream.notify:
            stream.is_first = True
            self._mark(stream)

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        """More output of a call."""
        stream = self._streams.get(key)
        if stream is None:
            return
        if text:
            stream.text.append(text)
        stream.tool_calls.extend(tool_calls)
        stream.tokens += tokens
        self._mark(stream, is_urgent=not stream.has_output)
        stream.has_output = True

    def end(self, ended: CallEnded, final: Ended) -> None:
        """The last word on a call: CallEnded, then Ended, whose `seq` is set here."""
        stream = self._streams.pop(final.key, None)
        if stream is None:
            self.post(subjects.call_ended(final.key.call_id), ended)
            return
        stream.final = (ended, final)
        self._mark(stream, is_urgent=True)

    def silent(self, now_s: float) -> list[CallKey]:
        """Streams whose reader should get a sign of life."""
        bound_s = now_s - self._working_every_s
        return [s.key for s in self._streams.values() if s.sent_s <= bound_s]

    def working(self, key: CallKey, state: WorkingState) -> None:
        """Send a sign of life."""
        stream = self._streams.get(key)
        if stream is not None:
            stream.sign = state
            self._mark(stream)

    def post(self, subject: str, message: Message) -> None:
        """Publish a message that is no stream's."""
        self._posts.append((subject, encode(message)))
        self._wanted.set()

    # --- publishing -----------------------------------------------------------------------------

    def _mark(self, stream: Stream, *, is_urgent: bool = False) -> None:
        self._dirty[stream.key] = stream
        self._wanted.set()
        if is_urgent:
            self._urgent.set()

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._urgent.clear()
            await self._flush()
            # Output gathers for a moment; the end of a call does not wait.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), self._coalesce_s)

    async def _flush(self) -> None:
        """Publish all that has gathered, each stream's messages in order."""
        while self._posts:
            subject, payload = self._posts.popleft()
            await self._publish(subject, payload)
        dirty, self._dirty = self._dirty, {}
        for stream in dirty.values():
            await self._flush_stream(stream)

    async def _flush_stream(self, stream: Stream) -> None:
        if stream.is_first:
            stream.is_first = False
            await self._publish(stream.notify, encode(FirstToken(key=stream.key)))
        message = stream.take()
        if message is not None:
            await self._send(stream, message)
        if stream.final is None:
            return
        call_ended, final = stream.final
        await self._publish(subjects.call_ended(stream.key.call_id), encode(call_ended))
        last = msgspec.structs.replace(final, seq=stream.seq + 1)
        await self._send(stream, last)
        if stream.notify:
            await self._publish(stream.notify, encode(last))
        await stream.listener.unsubscribe()

    async def _send(self, stream: Stream, message: Delta | Working | Ended) -> None:
        stream.sent_s = self._clock.now_s()
        payload = encode_as(message, stream.encoding)
        await self._publish(stream.inbox, payload, reply=stream.reply)

    async def _publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        try:
            await self._bus.publish(subject, payload, reply=reply)
        except TalariaError as error:
            # The bus is down: open streams end by on_disconnect, state by the next snapshot.
            _log.debug("not published", extra={"subject": subject, "reason": str(error)})
