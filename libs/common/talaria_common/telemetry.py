"""Metrics and traces of one service. IO.

Metrics are prometheus_client's, on a registry of their own. Spans are written when they are over,
with ids derived from what they describe, so that services that never met write one tree per
session without a context on the wire:

    trace id      sha256(tenant \\0 session)[:16]
    root span id  the next 8 bytes
    call          sha256(trace id, call id)[:8]                        child of the root
    part          sha256(trace id, call id, attempt, name, start)[:8]  child of its call

All attempts of a call share its span: an attempt whose instance has died leaves no orphans. The
root is written at the session's end; until then it is the one announced parent that is missing.
Nothing here blocks or raises because a collector is away.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from talaria_common import attributes as names
from talaria_common import logs

if TYPE_CHECKING:
    from talaria_common.config import TelemetryConfig
    from talaria_common.wire import CallKey

_log = logging.getLogger(__name__)

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str] | None]
"""Values of None are left out."""

BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
"""Default histogram buckets, in seconds: from a bus hop to a long session."""

CLOSE_WITHIN_S: Final = 2.0
EXPORT_TIMEOUT_S: Final = 2.0
WARN_EVERY_S: Final = 60.0
QUEUE_SPANS_MAX: Final = 16_384
"""About 600 calls of 25 spans; what comes above is dropped while the collector is away."""
BATCH_SPANS: Final = 512
EXPORT_EVERY_S: Final = 0.5

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("talaria")

M = TypeVar("M", Counter, Gauge, Histogram)


class Telemetry:
    """What a service measures and tells."""

    def __init__(self, metrics: Metrics, spans: Spans) -> None:
        self.metrics = metrics
        self.spans = spans

    @classmethod
    def create(
        cls,
        config: TelemetryConfig,
        *,
        service: str,
        member: str,
        exporter: SpanExporter | None = None,
    ) -> Telemetry:
        """Telemetry of one member of a service; sets up the process's log as a side effect.

        `exporter` stands in for OTLP. Without it and without an endpoint no span is made.
        """
        logs.set_up(config.log_level)
        if exporter is None and config.otlp_endpoint:
            exporter = _otlp_exporter(config.otlp_endpoint)
        return cls(Metrics(), Spans(service, member, exporter, config.sample_ratio))

    def close(self) -> None:
        """Send what is buffered, for at most 2 s; idempotent."""
        self.spans.close()


class Metrics:
    """Counters, gauges and histograms by name; asking twice gives the same object."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str, doc: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._get(Counter, name, doc, labels)

    def gauge(self, name: str, doc: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._get(Gauge, name, doc, labels)

    def histogram(
        self,
        name: str,
        doc: str,
        labels: tuple[str, ...] = (),
        buckets: Sequence[float] = BUCKETS_S,
    ) -> Histogram:
        return self._get(Histogram, name, doc, labels, buckets=tuple(buckets))

    def text(self) -> bytes:
        """All metrics in Prometheus' exposition format."""
        return generate_latest(self.registry)

    def _get(self, kind: type[M], name: str, doc: str, labels: tuple[str, ...], **more: Any) -> M:
        known = self._by_name.get(name)
        if known is None:
            known = kind(name, doc, labels, registry=self.registry, **more)
            self._by_name[name] = known
        if not isinstance(known, kind):
            raise ValueError(f"metric {name} is a {type(known).__name__}, not a {kind.__name__}")
        return known


class Spans:
    """Writes finished spans; does nothing without an exporter."""

    def __init__(
        self,
        service: str,
        member: str,
        exporter: SpanExporter | None = None,
        sample_ratio: float = 1.0,
    ) -> None:
        self._bound = round(sample_ratio * 2**64)
        self._processor: BatchSpanProcessor | None = None
        self._is_closed = False
        if exporter is None:
            return
        self._processor = BatchSpanProcessor(
            _QuietExporter(exporter),
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=int(EXPORT_EVERY_S * 1000),
            max_export_batch_size=BATCH_SPANS,
        )
        self._resource = Resource(
            {
                "service.name": service,
                "service.namespace": "talaria",
                "service.instance.id": member,
            }
        )

    @property
    def is_on(self) -> bool:
        """Spans go somewhere: costly attributes are worth computing."""
        return self._processor is not None and not self._is_closed

    @staticmethod
    def trace_id(tenant: str, session: str) -> str:
        """The session's trace, in hex."""
        return _trace_and_root(tenant, session)[0].hex()

    def session_start(
        self, tenant: str, session: str, start_unix_s: float, attributes: Attributes
    ) -> None:
        """A zero-length child of the root, so that a running trace can be found."""
        trace, root = _trace_and_root(tenant, session)
        span = _span_id(trace, "session.start")
        at = {names.CONVERSATION: session, **attributes}
        self._write(trace, span, root, "session.start", start_unix_s, start_unix_s, at)

    def session_root(
        self,
        tenant: str,
        session: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: Attributes,
    ) -> None:
        """The session itself, when it is over."""
        trace, root = _trace_and_root(tenant, session)
        at = {names.CONVERSATION: session, **attributes}
        self._write(trace, root, None, "session", start_unix_s, end_unix_s, at)

    def call(
        self,
        tenant: str,
        session: str,
        key: CallKey,
        name: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: Attributes,
    ) -> None:
        """One call with all its attempts; written once, by its front door."""
        trace, root = _trace_and_root(tenant, session)
        at = {names.CONVERSATION: session, names.CALL: key.call_id, **attributes}
        span = _span_id(trace, key.call_id)
        self._write(trace, span, root, name, start_unix_s, end_unix_s, at, SpanKind.SERVER)

    def part(
        self,
        tenant: str,
        session: str,
        key: CallKey | None,
        name: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: Attributes,
    ) -> None:
        """A stretch of a call's time; with `key` None of the session's own (a tool gap)."""
        trace, root = _trace_and_root(tenant, session)
        start = repr(start_unix_s)
        if key is None:
            span, parent = _span_id(trace, name, start), root
            at: Attributes = attributes
        else:
            span = _span_id(trace, str(key), name, start)
            parent = _span_id(trace, key.call_id)
            at = {names.CALL: key.call_id, names.ATTEMPT: key.attempt, **attributes}
        self._write(trace, span, parent, name, start_unix_s, end_unix_s, at)

    def close(self) -> None:
        """Send what is buffered, for at most 2 s; idempotent."""
        if self._processor is None or self._is_closed:
            return
        self._is_closed = True
        # The processor's own shutdown waits out an exporter that retries.
        closer = threading.Thread(target=self._processor.shutdown, daemon=True)
        closer.start()
        closer.join(CLOSE_WITHIN_S)

    def _write(
        self,
        trace: bytes,
        span: bytes,
        parent: bytes | None,
        name: str,
        start_unix_s: float,
        end_unix_s: float,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        # The low 64 bits decide, as TraceIdRatioBased does: all services agree on a session.
        if self._processor is None or int.from_bytes(trace[8:], "big") >= self._bound:
            return
        is_error = attributes.get(names.ERROR_TYPE) is not None
        start_ns = round(start_unix_s * 1e9)
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=_context(trace, span, is_remote=False),
                parent=None if parent is None else _context(trace, parent, is_remote=True),
                resource=self._resource,
                attributes={k: v for k, v in attributes.items() if v is not None},
                kind=kind,
                status=Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
                start_time=start_ns,
                end_time=max(start_ns, round(end_unix_s * 1e9)),
                instrumentation_scope=_SCOPE,
            )
        )


class _QuietExporter(SpanExporter):
    """An exporter whose failures are counted and told once a minute."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lost = 0
        self._warned_s: float | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
            reason = ""
        except Exception as error:  # a broken collector must not end the export thread
            result, reason = SpanExportResult.FAILURE, f": {error}"
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            now_s = time.monotonic()
            if self._warned_s is None or now_s - self._warned_s >= WARN_EVERY_S:
                self._warned_s = now_s
                _log.warning("traces cannot be exported%s", reason, extra={"spans": self._lost})
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint.rstrip("/")
    if not url.endswith("/v1/traces"):
        url += "/v1/traces"
    return OTLPSpanExporter(endpoint=url, timeout=int(EXPORT_TIMEOUT_S))


def _trace_and_root(tenant: str, session: str) -> tuple[bytes, bytes]:
    digest = hashlib.sha256(f"{tenant}\0{session}".encode()).digest()
    return digest[:16], digest[16:24]


def _span_id(trace: bytes, *parts: str) -> bytes:
    return hashlib.sha256(trace + "\0".join(parts).encode()).digest()[:8]


def _context(trace: bytes, span: bytes, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace, "big"), int.from_bytes(span, "big"), is_remote, _SAMPLED
    )
