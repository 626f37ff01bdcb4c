"""Helpers for tests: waiting on a condition, free ports, an OTLP collector in the process. IO.

Fixtures live in tests/conftest.py.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar, overload

import msgspec

T = TypeVar("T")

POLL_S: Final = 0.01
EARLY_S: Final = 0.001
"""How much a child may start before its parent: the rounding of two services' wall clocks."""


@overload
async def eventually(
    check: Callable[[], Awaitable[T]], within_s: float = 5.0, why: str = "condition"
) -> T: ...
@overload
async def eventually(
    check: Callable[[], T], within_s: float = 5.0, why: str = "condition"
) -> T: ...
async def eventually(
    check: Callable[[], Any], within_s: float = 5.0, why: str = "condition"
) -> Any:
    """The first true value of `check`, asked each 10 ms; AssertionError with `why` after `within_s`.

    An AssertionError of `check` counts as not yet.
    """
    deadline_s = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"{why}: not within {within_s:g} s (last: {last!r})")
        await asyncio.sleep(POLL_S)


def find_free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A span as the collector got it; ids in hex, an empty parent is a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_s: float
    end_s: float
    service: str
    member: str = ""
    is_error: bool = False
    attributes: dict[str, Any] = {}


class OtlpSink:
    """An OTLP/HTTP collector on a free port that keeps what it gets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SpanRecord] = []
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                sink.receive(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """What goes into `[telemetry] otlp_endpoint`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def spans(self) -> list[SpanRecord]:
        """All spans so far, in the order of arrival."""
        with self._lock:
            return list(self._spans)

    def receive(self, body: bytes) -> None:
        """Decode one ExportTraceServiceRequest and keep its spans."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        got = [
            _record(span, _values(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans.extend(got)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> OtlpSink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tree_problems(spans: Iterable[SpanRecord], *, running: Iterable[str] = ()) -> list[str]:
    """What keeps the spans from being one tree per trace; empty when all is well.

    `running`: trace ids whose root is not written yet, so that exactly one parent, the announced
    root, may be missing there.
    """
    traces: dict[str, list[SpanRecord]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    running = set(running)
    return [
        problem
        for trace, members in traces.items()
        for problem in _trace_problems(trace, members, trace in running)
    ]


def _trace_problems(trace: str, spans: list[SpanRecord], is_running: bool) -> list[str]:
    problems: list[str] = []
    by_id: dict[str, SpanRecord] = {}
    for span in spans:
        if span.span_id in by_id:
            problems.append(
                f"trace {trace}: {span.name} and {by_id[span.span_id].name} share an id"
            )
        by_id[span.span_id] = span
    roots = [span for span in spans if not span.parent_id]
    if len(roots) != (0 if is_running else 1):
        problems.append(f"trace {trace}: {len(roots)} roots")
    absent = {span.parent_id for span in spans if span.parent_id and span.parent_id not in by_id}
    announced = {span.parent_id for span in spans if span.name == "session.start"}
    for span in spans:
        if span.parent_id in absent and not (is_running and announced == {span.parent_id}):
            problems.append(f"trace {trace}: {span.service} {span.name} is an orphan")
        parent = by_id.get(span.parent_id)
        if parent is not None and span.start_s < parent.start_s - EARLY_S:
            early_s = parent.start_s - span.start_s
            problems.append(
                f"trace {trace}: {span.name} starts {early_s:.4f} s before its parent {parent.name}"
            )
        if span.end_s < span.start_s:
            problems.append(f"trace {trace}: {span.name} ends before it starts")
    return problems


def _record(span: Any, resource: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        service=resource.get("service.name", ""),
        member=resource.get("service.instance.id", ""),
        is_error=span.status.code == 2,
        attributes=_values(span.attributes),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case kind:
            return getattr(value, kind)
