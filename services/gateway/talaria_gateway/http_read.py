"""The paths that only tell: models, health, metrics, sessions. IO."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from talaria_common import subjects, wire
from talaria_common.bus import NoResponders
from talaria_common.errors import Rejected, TalariaError, Unavailable
from talaria_common.ids import new_ulid
from talaria_common.wire import (
    CallKey,
    EndSession,
    GetSession,
    GetSessions,
    NotGranted,
    PlaceCall,
    SessionList,
    SessionQuery,
    SessionRow,
)
from talaria_gateway import identity, openai
from talaria_gateway.calls import Calls, bus_down
from talaria_gateway.http_chat import request_headers
from talaria_gateway.retry import error_of

QUERY_TIMEOUT_S: Final = 2.0
READY_TIMEOUT_S: Final = 1.0
READY_KEPT_S: Final = 0.5
"""How long an answer to the readiness probe is kept, so that probes cost the router nothing."""
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_HIDDEN: Final = ("tenant", "tail", "epoch")


class Telling:
    """Endpoints of Starlette routes."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._context = calls.context
        self._started_unix_s = calls.context.clock.unix_s()
        self._ready: tuple[float, list[str]] | None = None
        metrics = calls.context.telemetry.metrics
        self._running = metrics.gauge(
            "talaria_calls_running",
            "Calls in decode or prefill, over all live instances",
            ("model",),
        )
        self._waiting = metrics.gauge(
            "talaria_calls_waiting",
            "Calls queued on instances, over all live instances",
            ("model",),
        )

    # --- models -----------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return _json(self.model_list())

    def model_list(self) -> bytes:
        """The list as JSON, for both doors."""
        return openai.model_list([self._entry(m, n) for m, n in self._calls.pool.models().items()])

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        known = self._calls.pool.models()
        if name not in known:
            raise Rejected("unknown_model", f"the model {name!r} does not exist", param="model")
        return _json(msgspec.json.encode(self._entry(name, known[name])))

    def _entry(self, model: str, max_model_len: int) -> dict[str, Any]:
        residency = self._calls.pool.residency(model, self._context.clock.now_s())
        entry = openai.model_object(model, max_model_len, self._started_unix_s)
        return entry | {"engine": self._calls.pool.engines(model), "residency": residency}

    # --- health and metrics -----------------------------------------------------------------------

    async def live(self, request: Request) -> Response:
        return _json(b'{"status":"live"}')

    async def ready(self, request: Request) -> Response:
        """200 when a call would find its way; else 503 with what is missing."""
        now_s = self._context.clock.now_s()
        if self._ready is None or now_s - self._ready[0] > READY_KEPT_S:
            self._ready = (now_s, await self.missing())
        missing = self._ready[1]
        body = {"status": "not ready" if missing else "ready", "reasons": missing}
        return _json(msgspec.json.encode(body), 503 if missing else 200)

    async def missing(self) -> list[str]:
        """Why a call would not find its way now; empty if it would."""
        if not self._context.bus.is_connected or not self._context.body_bus.is_connected:
            return ["the message bus is down"]
        out = ["the gateway is shutting down"] if self._calls.is_draining else []
        if not self._calls.pool.ready(self._context.clock.now_s()):
            out.append("no instance is ready")
        # A call for no model: the router answers that there is none, and nothing else happens.
        probe = PlaceCall(key=CallKey(new_ulid()), model="")
        if not await self._answers(subjects.PLACE, wire.encode(probe)):
            out.append("no router answers")
        if not await self._answers(subjects.SESSIONS, wire.encode(GetSessions(limit=1))):
            out.append("admission does not answer")
        return out

    async def _answers(self, subject: str, payload: bytes) -> bool:
        try:
            await self._context.bus.request(subject, payload, timeout_s=READY_TIMEOUT_S)
        except TalariaError:
            return False
        return True

    async def metrics(self, request: Request) -> Response:
        now_s = self._context.clock.now_s()
        held = self._calls.held.counts(now_s)
        for model, gauges in self._calls.pool.gauges(held, now_s).items():
            self._running.labels(model).set(gauges.running)
            self._waiting.labels(model).set(gauges.waiting)
        return Response(self._context.telemetry.metrics.text(), media_type=METRICS_TYPE)

    # --- sessions ---------------------------------------------------------------------------------

    async def sessions(self, request: Request) -> Response:
        tenant = identity.tenant(request_headers(request.scope))
        answer = await self._query(GetSessions(tenant=tenant))
        return _json(msgspec.json.encode({"data": [_document(row) for row in answer.sessions]}))

    async def session(self, request: Request) -> Response:
        """The document of a session, `/explain`, or its end (DELETE)."""
        tenant = identity.tenant(request_headers(request.scope))
        session, is_explain = _session_path(request)
        if request.method == "DELETE":
            if is_explain:
                raise Rejected("method_not_allowed", "DELETE ends a session, not its explanation")
            answer = await self._query(EndSession(tenant=tenant, session=session))
            document = _document(answer.sessions[0]) if answer.sessions else {"id": session}
            return _json(msgspec.json.encode(document | {"state": "closed"}))
        answer = await self._query(GetSession(tenant=tenant, session=session))
        if not answer.sessions:
            raise Rejected("unknown_session", f"no session {session!r}")
        if is_explain:
            return _json(msgspec.json.encode({"decisions": answer.decisions}))
        return _json(msgspec.json.encode(_document(answer.sessions[0])))

    async def _query(self, query: SessionQuery) -> SessionList:
        if not self._context.bus.is_connected:
            raise bus_down()
        try:
            message = await self._context.bus.request(
                subjects.SESSIONS, wire.encode(query), timeout_s=QUERY_TIMEOUT_S
            )
        except NoResponders as error:
            raise Unavailable("no_instance", "admission is away", retry_after_s=1.0) from error
        answer = wire.decode(wire.SESSION_ANSWER, message.payload)
        match answer:
            case SessionList():
                return answer
            case NotGranted():
                raise error_of(answer.error)
            case None:
                self._calls.unreadable()
                raise Unavailable("internal", "admission's answer cannot be read")


def _document(row: SessionRow) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(row)
    return {name: value for name, value in document.items() if name not in _HIDDEN}


def _session_path(request: Request) -> tuple[str, bool]:
    """The session's id, and whether its explanation is asked for; ids are percent-encoded."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    parts = raw.split(b"?")[0].decode("latin-1").split("/")[3:]
    is_explain = len(parts) == 2 and parts[1] == "explain"
    if len(parts) != 1 + is_explain or not parts[0]:
        raise Rejected("not_found", f"no such path: {request.url.path}")
    return unquote(parts[0]), is_explain


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")
