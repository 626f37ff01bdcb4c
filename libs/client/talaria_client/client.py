"""The client of the NATS API. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from talaria_client.stream import CallStream
from talaria_client.types import Answer, Chunk, ModelInfo, joined
from talaria_common import subjects, wire
from talaria_common.bus import Bus, BusDown, Msg
from talaria_common.errors import TalariaError, Unavailable
from talaria_common.ids import new_ulid
from talaria_common.nats_bus import NatsBus
from talaria_common.wire import CancelCall, ToolDelta, Usage

SILENCE_S: Final = 5.0
"""Nobody is silent for so long while a call lives (protocols 1)."""
WAITING_MAX: Final = 65_536
"""Messages of one call that its reader has not taken yet."""
MODELS_TIMEOUT_S: Final = 3.0
CANCEL_AGAIN_S: Final = (0.0, 0.5, 1.0)
"""Pauses before each publication of a cancel: at 0, 0.5 and 1.5 s."""


class _Models(msgspec.Struct):
    data: list[ModelInfo]


_models: Final = msgspec.json.Decoder(_Models)


class Client:
    """A connection to a Talaria deployment; `async with Client.connect(url) as client`.

    Calls raise `Rejected` (the caller's fault) or `Unavailable` (a retry may help), with a `code`.
    """

    def __init__(
        self, url: str, *, user: str = "", password: str = "", bus: Bus | None = None
    ) -> None:
        self._url = url
        self._user = user
        self._password = password
        self._given = bus
        self._bus: Bus | None = bus
        self._open: set[asyncio.Queue[Msg | TalariaError]] = set()
        self._cancels: set[asyncio.Task[None]] = set()

    @classmethod
    def connect(cls, url: str, *, user: str = "", password: str = "") -> Self:
        """A client that connects when it is entered; raises `bus_down` there."""
        return cls(url, user=user, password=password)

    async def __aenter__(self) -> Self:
        if self._bus is None:
            self._bus = await NatsBus.connect(
                self._url, name="talaria-client", user=self._user, password=self._password
            )
        self._bus.on_disconnect(self._on_bus_lost)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is left to say and disconnect; idempotent."""
        if self._cancels:
            await asyncio.wait(self._cancels, timeout=0.1)
        for task in list(self._cancels):
            task.cancel()
        await asyncio.gather(*self._cancels, return_exceptions=True)
        bus, self._bus = self._bus, None
        if bus is not None and bus is not self._given:
            await bus.close()

    # --- calls ------------------------------------------------------------------------------------

    def chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        session: str | None = None,
        parent: str | None = None,
        tenant: str = "",
        is_final: bool = False,
        request_id: str = "",
        **params: Any,
    ) -> AsyncIterator[Chunk]:
        """Chunks of a chat call as they are generated; `params` are fields of the OpenAI body."""
        headers = _headers(session, parent, tenant, is_final, request_id)
        body = {"model": model, "messages": messages, **params}
        return self._call(subjects.CHAT, body, headers)

    def completions(
        self,
        *,
        model: str,
        prompt: str,
        session: str | None = None,
        tenant: str = "",
        request_id: str = "",
        **params: Any,
    ) -> AsyncIterator[Chunk]:
        """Chunks of a plain completion."""
        headers = _headers(session, None, tenant, False, request_id)
        return self._call(
            subjects.COMPLETIONS, {"model": model, "prompt": prompt, **params}, headers
        )

    async def complete(
        self, *, model: str, messages: Sequence[Mapping[str, Any]], **more: Any
    ) -> Answer:
        """The whole answer of a chat call; arguments as `chat`."""
        text: list[str] = []
        pieces: list[ToolDelta] = []
        last = Chunk()
        async for chunk in self.chat(model=model, messages=messages, **more):
            text.append(chunk.text)
            pieces += chunk.tool_calls
            last = chunk
        return Answer(
            text="".join(text),
            tool_calls=joined(pieces),
            finish_reason=last.finish_reason or "stop",
            usage=last.usage or Usage(),
            call_id=last.call_id,
            session=last.session,
        )

    async def models(self) -> list[ModelInfo]:
        """The models that the deployment serves."""
        answer = await self._connected().request(subjects.MODELS, b"", timeout_s=MODELS_TIMEOUT_S)
        return _models.decode(answer.payload).data

    # --- the stream -------------------------------------------------------------------------------

    async def _call(
        self, subject: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[Chunk]:
        bus, call_id = self._connected(), new_ulid()
        inbox = bus.new_inbox()
        came: asyncio.Queue[Msg | TalariaError] = asyncio.Queue(WAITING_MAX)
        stream = CallStream(call_id)

        async def receive(message: Msg) -> None:
            with contextlib.suppress(asyncio.QueueFull):  # the gap in the numbers tells
                came.put_nowait(message)

        payload = msgspec.json.encode(body)
        subscription = await bus.listen(inbox, receive)
        self._open.add(came)
        try:
            await bus.publish(
                subject, payload, reply=inbox, headers=headers | {"X-Talaria-Call-ID": call_id}
            )
            while not stream.is_over:
                message = _read(await _next(came))
                chunk = stream.apply(message) if message is not None else None
                if chunk is not None:
                    yield chunk
        except BusDown:
            stream.is_over = True
            raise
        finally:
            self._open.discard(came)
            if not stream.is_over:
                self._cancel(bus, call_id)
            await subscription.unsubscribe()

    def _cancel(self, bus: Bus, call_id: str) -> None:
        task = asyncio.get_running_loop().create_task(_announce_cancel(bus, call_id))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    def _on_bus_lost(self) -> None:
        for came in self._open:
            with contextlib.suppress(asyncio.QueueFull):  # then the silence tells
                came.put_nowait(BusDown("the connection to NATS was lost"))

    def _connected(self) -> Bus:
        if self._bus is None:
            raise BusDown("the client is not connected: use `async with Client.connect(url)`")
        return self._bus


async def _next(came: asyncio.Queue[Msg | TalariaError]) -> Msg:
    try:
        async with asyncio.timeout(SILENCE_S):
            message = await came.get()
    except TimeoutError as error:
        raise Unavailable("connection_lost", f"nothing came for {SILENCE_S:g} s") from error
    if isinstance(message, TalariaError):
        raise message
    return message


def _read(message: Msg) -> wire.PublicMessage | None:
    """The message; None for a kind that this version does not know."""
    if message.is_no_responders:
        raise Unavailable("no_instance", "no gateway listens on this NATS server")
    try:
        return wire.PUBLIC.decode(message.payload)
    except msgspec.DecodeError:
        return None


async def _announce_cancel(bus: Bus, call_id: str) -> None:
    payload = wire.encode(CancelCall(call_id=call_id))
    for pause_s in CANCEL_AGAIN_S:
        await asyncio.sleep(pause_s)
        with contextlib.suppress(TalariaError):
            await bus.publish(subjects.cancel(call_id), payload)


def _headers(
    session: str | None, parent: str | None, tenant: str, is_final: bool, request_id: str
) -> dict[str, str]:
    given = {
        "X-Talaria-Session-ID": session,
        "X-Talaria-Parent-Session-ID": parent,
        "X-Tenant-ID": tenant or None,
        "X-Talaria-Session-Final": "true" if is_final else None,
        "X-Request-ID": request_id or None,
    }
    return {name: value for name, value in given.items() if value is not None}
