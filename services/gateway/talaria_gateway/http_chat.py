"""The paths that make calls: bare ASGI, so that a client's leaving is seen at once. IO."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from talaria_common.clock import Clock
from talaria_common.errors import Rejected, TalariaError, Unavailable
from talaria_common.ids import new_ulid
from talaria_common.wire import Delta, Ended, Endpoint, Granted
from talaria_gateway import identity, openai
from talaria_gateway.calls import Calls
from talaria_gateway.http_call import HttpCall
from talaria_gateway.intake import Intake, too_large
from talaria_gateway.openai import Frames
from talaria_gateway.outbox import Event, Failed, Started

_log = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]

JSON: Final = (b"content-type", b"application/json")
EVENT_STREAM: Final[RawHeaders] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(Exception):
    """The client hung up before its request was whole."""


class CallEndpoint:
    """One of the two paths that make calls."""

    def __init__(self, calls: Calls, intake: Intake, endpoint: Endpoint) -> None:
        self._calls = calls
        self._config = calls.config
        self._clock: Clock = calls.context.clock
        self._intake = intake
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s, arrived_unix_s = self._clock.now_s(), self._clock.unix_s()
        headers = request_headers(scope)
        request_id = identity.request_id(headers) or new_ulid()
        try:
            raw = await self._read(headers, receive)
            ask = self._intake.ask(
                self._endpoint,
                headers,
                raw,
                request_id=request_id,
                arrived_s=arrived_s,
                arrived_unix_s=arrived_unix_s,
            )
            call = HttpCall(self._calls, ask)
            self._calls.open(call)
        except ClientLeft:
            return
        except TalariaError as error:
            self._calls.account.refused("none", error.code)
            await send_error(send, error, _identity_headers(headers, request_id))
            return
        watcher = asyncio.create_task(_watch(receive, call))
        try:
            if ask.checked.is_stream:
                await self._stream(call, send)
            else:
                await self._whole(call, send)
        except TimeoutError:
            detail = f"the reader is more than {self._config.reader_behind_s:g} s behind"
            _log.info("a reader was cut", extra={"call": ask.call_id})
            call.stop(Unavailable("connection_lost", detail))
        finally:
            watcher.cancel()
            call.deliver()
            call.cancel()

    async def _read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The body, in pieces as they come; raises as soon as it is too large."""
        limit = self._config.body_bytes_max
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_large(limit)
        pieces: list[bytes] = []
        nbytes = 0
        while True:
            try:
                async with asyncio.timeout(self._config.body_silence_s):
                    message = await receive()
            except TimeoutError as error:
                raise Rejected("invalid_request", "the body has stopped arriving") from error
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            nbytes += len(piece)
            if nbytes > limit:
                raise too_large(limit)
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    # --- answers ----------------------------------------------------------------------------------

    async def _whole(self, call: HttpCall, send: Send) -> None:
        frames = self._frames(call)
        while True:
            for event in await call.outbox.take(None):
                match event:
                    case Started():
                        pass
                    case Delta():
                        frames.collect(event)
                    case Ended():
                        body = frames.whole(event)
                        self._remember(call, frames)
                        call.deliver()
                        await self._send(send, _start(200, _call_headers(call, [JSON]), len(body)))
                        await self._send(send, _body(body, is_last=True))
                        return
                    case Failed():
                        await self._send_error(send, call, event.error)
                        return

    async def _stream(self, call: HttpCall, send: Send) -> None:
        events = await call.outbox.take(self._config.hold_status_s)
        if events and isinstance(events[-1], Failed) and not _has_token(events):
            await self._send_error(send, call, events[-1].error)
            return
        frames = self._frames(call)
        self._remember(call, frames)
        await self._send(send, _start(200, _call_headers(call, EVENT_STREAM)))
        silence = openai.KEEP_ALIVE  # said at once if the status had to go out before acceptance
        while True:
            data, is_last = _framed(events, frames) if events else (silence, False)
            if is_last:
                call.deliver()
            if data or is_last:
                await self._send(send, _body(data, is_last=is_last))
            if is_last:
                return
            events = await call.outbox.take(self._config.keep_alive_s)

    def _frames(self, call: HttpCall) -> Frames:
        checked = call.ask.checked
        return Frames(
            self._endpoint,
            call.ask.call_id,
            checked.model,
            call.ask.arrived_unix_s,
            with_usage=checked.includes_usage,
        )

    def _remember(self, call: HttpCall, frames: Frames) -> None:
        if call.granted is not None:
            self._calls.answers.remember(call.ask.tenant, frames.id, call.granted.session)

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        """Hand bytes to the connection; TimeoutError when the reader takes nothing for too long."""
        async with asyncio.timeout(self._config.reader_behind_s):
            await send(message)

    async def _send_error(self, send: Send, call: HttpCall, error: TalariaError) -> None:
        await send_error(send, error, _call_headers(call, []))


def request_headers(scope: Scope) -> dict[str, str]:
    """The request's headers by normalised name."""
    return identity.normalised(
        (name.decode("latin-1"), _text(value)) for name, value in scope["headers"]
    )


async def send_error(send: Send, error: TalariaError, headers: RawHeaders) -> None:
    """OpenAI's error JSON with its status."""
    body = openai.error_body(error)
    after = openai.retry_after(error)
    extra = [JSON] if after is None else [JSON, (b"retry-after", after.encode())]
    await send(_start(error.http_status, [*headers, *extra], len(body)))
    await send(_body(body, is_last=True))


async def _watch(receive: Receive, call: HttpCall) -> None:
    """Cancel the call when its client leaves."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            call.cancel()
            return


def _has_token(events: list[Event]) -> bool:
    return any(isinstance(event, Delta) for event in events)


def _framed(events: list[Event], frames: Frames) -> tuple[bytes, bool]:
    """The bytes of a batch of events, and whether the stream ends with them."""
    out = bytearray()
    for event in events:
        match event:
            case Started():
                pass
            case Delta():
                out += frames.chunks(event)
            case Ended():
                return bytes(out + frames.end(event)), True
            case Failed():
                return bytes(out + openai.error_event(event.error)), True
    return bytes(out), False


def _start(status: int, headers: RawHeaders, length: int | None = None) -> dict[str, object]:
    if length is not None:
        headers = [*headers, (b"content-length", str(length).encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(body: bytes, *, is_last: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def _call_headers(call: HttpCall, more: RawHeaders) -> RawHeaders:
    granted: Granted | None = call.granted
    if granted is not None:
        session, source = granted.session, granted.source
    else:
        session, source = call.ask.identity.session or "", call.ask.identity.source
    return _headers(call.ask.request_id, session, source if session else "none", more)


def _identity_headers(headers: Mapping[str, str], request_id: str) -> RawHeaders:
    """Headers of an error that came before there was a call."""
    try:
        who = identity.from_headers(headers)
    except TalariaError:
        return _headers(request_id, "", "none", [])
    return _headers(request_id, who.session or "", who.source if who.session else "none", [])


def _headers(request_id: str, session: str, source: str, more: RawHeaders) -> RawHeaders:
    return [
        (b"x-request-id", request_id.encode()),
        (b"x-session-id", session.encode()),
        (b"x-talaria-session-source", source.encode()),
        *more,
    ]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
