"""The HTTP server: routes, errors as OpenAI's JSON, uvicorn inside this process's loop. IO."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from talaria_common.errors import InvariantBroken, Rejected, TalariaError
from talaria_gateway import openai
from talaria_gateway.calls import Calls
from talaria_gateway.config import GatewayConfig
from talaria_gateway.http_chat import CallEndpoint
from talaria_gateway.http_read import Telling
from talaria_gateway.intake import Intake

_log = logging.getLogger(__name__)

BACKLOG: Final = 2048
IDLE_S: Final = 75
STOP_S: Final = 2.0


def build_app(calls: Calls, intake: Intake, telling: Telling) -> Starlette:
    """All paths of the gateway."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", CallEndpoint(calls, intake, "chat"), methods=["POST"]),
            Route("/v1/completions", CallEndpoint(calls, intake, "completions"), methods=["POST"]),
            Route("/v1/models", telling.models),
            Route("/v1/models/{id:path}", telling.model),
            Route("/v1/sessions", telling.sessions),
            Route("/v1/sessions/{path:path}", telling.session, methods=["GET", "DELETE"]),
            Route("/health/live", telling.live),
            Route("/health/ready", telling.ready),
            Route("/metrics", telling.metrics),
        ],
        exception_handlers={
            TalariaError: _on_talaria_error,
            HTTPException: _on_http_error,
            Exception: _on_mistake,
        },
    )


async def _on_talaria_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TalariaError)
    after = openai.retry_after(error)
    headers = {} if after is None else {"retry-after": after}
    return Response(
        openai.error_body(error), error.http_status, headers, media_type="application/json"
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        refused = Rejected("method_not_allowed", f"{path} does not take {request.method}")
    else:
        refused = Rejected("not_found", f"no such path: {path}")
    answer = await _on_talaria_error(request, refused)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _on_mistake(request: Request, error: Exception) -> Response:
    return await _on_talaria_error(request, InvariantBroken("the gateway failed; its log says how"))


class PortTaken(Rejected):
    """The address cannot be listened on."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            "invalid_request",
            f"cannot listen on {host}:{port}: {reason}; choose another port with --port "
            "or TALARIA_GATEWAY__PORT",
        )


class _Uvicorn(uvicorn.Server):
    """A server whose signals are somebody else's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """uvicorn on a socket of ours, so that a taken port is known before anything starts."""

    def __init__(self, app: Starlette, config: GatewayConfig) -> None:
        self._config = config
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
            )
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the chosen port where the configured one is 0."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen; raises PortTaken."""
        self._socket = _listening(self._config.host, self._config.port)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise InvariantBroken("the HTTP server has ended at once")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop listening; open connections get 2 s to end."""
        if self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=STOP_S)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=STOP_S)
        self._task = None
        if self._socket is not None:
            self._socket.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise PortTaken(host, port, error.strerror or str(error)) from error
    sock.setblocking(False)
    return sock
