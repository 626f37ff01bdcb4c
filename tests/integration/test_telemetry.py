"""Spans over OTLP, metrics and logs."""

from __future__ import annotations

import hashlib
import io
import logging
import sys
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from talaria_common import attributes, logs
from talaria_common.config import TelemetryConfig
from talaria_common.telemetry import Spans, Telemetry
from talaria_common.testing import OtlpSink, SpanRecord, find_free_port, tree_problems
from talaria_common.wire import CallKey

KEY = CallKey("call-1", 2)
T0 = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _keep_root_log() -> object:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


def a_telemetry(endpoint: str, service: str = "gateway", **settings: float) -> Telemetry:
    config = TelemetryConfig(otlp_endpoint=endpoint, **settings)  # type: ignore[arg-type]
    return Telemetry.create(config, service=service, member=f"{service}-1")


def write_session(gateway: Telemetry, admission: Telemetry, instance: Telemetry) -> None:
    admission.spans.session_start("t", "s", T0, {"talaria.session.source": "header"})
    for n in (1, 2):
        key = CallKey(f"call-{n}", n)
        start_s = T0 + n
        instance.spans.part("t", "s", key, "queue", start_s + 0.1, start_s + 0.2, {})
        instance.spans.part("t", "s", key, "decode", start_s + 0.2, start_s + 0.3, {})
        instance.spans.part("t", "s", key, "decode", start_s + 0.3, start_s + 0.4, {})
        admission.spans.part("t", "s", CallKey(f"call-{n}", 1), "admit", start_s, start_s, {})
        gateway.spans.call("t", "s", key, "chat m", start_s, start_s + 0.5, {"gone": None})
    admission.spans.part("t", "s", None, "tool_gap", T0 + 1.5, T0 + 2, {})


def test_a_session_is_one_tree_across_services() -> None:
    with OtlpSink() as sink:
        services = [a_telemetry(sink.url, name) for name in ("gateway", "admission", "i")]
        write_session(*services)
        services[1].spans.session_root("t", "s", T0, T0 + 3, {attributes.SCT_S: 3.0})
        for telemetry in services:
            telemetry.close()
            telemetry.close()
        spans = sink.spans
    assert tree_problems(spans) == []
    by_name = {span.name: span for span in spans}
    assert len(spans) == 2 * 5 + 3
    root, gap, call = by_name["session"], by_name["tool_gap"], by_name["chat m"]
    digest = hashlib.sha256(b"t\0s").hexdigest()
    assert (root.trace_id, root.span_id) == (digest[:32], digest[32:48])
    assert Spans.trace_id("t", "s") == digest[:32]
    assert (root.start_s, root.end_s) == (T0, T0 + 3)
    assert root.attributes == {attributes.CONVERSATION: "s", attributes.SCT_S: 3.0}
    assert gap.parent_id == root.span_id
    assert call.parent_id == root.span_id
    assert (call.service, call.member) == ("gateway", "gateway-1")
    assert by_name["decode"].parent_id == call.span_id
    assert by_name["decode"].attributes[attributes.ATTEMPT] == 2
    assert by_name["admit"].parent_id == call.span_id, "attempts share the call's span"
    start = by_name["session.start"]
    assert start.start_s == start.end_s


def test_a_running_session_lacks_its_root_alone() -> None:
    with OtlpSink() as sink:
        services = [a_telemetry(sink.url, name) for name in ("gateway", "admission", "i")]
        write_session(*services)
        for telemetry in services:
            telemetry.close()
        spans = sink.spans
    assert tree_problems(spans, running={Spans.trace_id("t", "s")}) == []
    assert tree_problems(spans) != []


def test_spans_repeat_to_the_same_ids() -> None:
    with OtlpSink() as sink:
        for _ in range(2):
            telemetry = a_telemetry(sink.url)
            telemetry.spans.part("t", "s", KEY, "queue", T0, T0 + 1, {})
            telemetry.spans.part("t", "s", KEY, "queue", T0 + 2, T0 + 3, {})
            telemetry.close()
        ids = [span.span_id for span in sorted(sink.spans, key=lambda span: span.start_s)]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_an_error_attribute_marks_the_span() -> None:
    with OtlpSink() as sink:
        telemetry = a_telemetry(sink.url)
        telemetry.spans.call("t", "s", KEY, "chat", T0, T0, {attributes.ERROR_TYPE: "overloaded"})
        telemetry.spans.part("t", "s", KEY, "queue", T0, T0 - 1, {attributes.ERROR_TYPE: None})
        telemetry.close()
        call, part = sorted(sink.spans, key=lambda span: span.name)
    assert call.is_error
    assert not part.is_error
    assert part.end_s == part.start_s, "a negative length is cut to zero"


def test_sampling_keeps_or_drops_whole_sessions() -> None:
    with OtlpSink() as sink:
        services = [a_telemetry(sink.url, name, sample_ratio=0.3) for name in ("gateway", "router")]
        for n in range(200):
            for telemetry in services:
                telemetry.spans.part("t", f"s{n}", KEY, telemetry_name(telemetry), T0, T0, {})
        for telemetry in services:
            telemetry.close()
        spans = sink.spans
    kept = {span.trace_id for span in spans}
    assert 30 <= len(kept) <= 90
    assert len(spans) == 2 * len(kept)


def telemetry_name(telemetry: Telemetry) -> str:
    return f"part-{id(telemetry)}"


def test_without_an_endpoint_nothing_is_written() -> None:
    telemetry = a_telemetry("")
    assert not telemetry.spans.is_on
    telemetry.spans.session_start("t", "s", T0, {})
    telemetry.close()


class Broken(SpanExporter):
    """Loses what it gets, in one of two ways."""

    def __init__(self, error: Exception | None) -> None:
        self.batches = 0
        self._error = error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches += 1
        if self._error is not None:
            raise self._error
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
def test_a_failing_exporter_is_told_once(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Broken(error)
    spans = Spans("gateway", "gateway-1", exporter)
    assert spans._processor is not None
    for n in range(3):
        spans.part("t", "s", KEY, f"p{n}", T0, T0, {})
        spans._processor.force_flush()
    spans.close()
    assert exporter.batches == 3
    told = [record for record in caplog.records if "exported" in record.getMessage()]
    assert len(told) == 1


def test_a_dead_collector_neither_blocks_nor_floods(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = a_telemetry(f"http://127.0.0.1:{find_free_port()}")
    began_s = time.monotonic()
    for n in range(20_000):
        telemetry.spans.part("t", "s", KEY, f"p{n}", T0, T0, {})
    written_s = time.monotonic() - began_s
    telemetry.close()
    assert written_s < 5
    assert time.monotonic() - began_s - written_s < 3
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "exported" in line]) <= 1
    assert len(lines) <= 2


# --- the tree checker itself --------------------------------------------------------------------


def a_span(**fields: object) -> SpanRecord:
    defaults: dict[str, object] = {
        "trace_id": "t",
        "span_id": "1",
        "parent_id": "",
        "name": "session",
        "start_s": 1.0,
        "end_s": 2.0,
        "service": "s",
    }
    return SpanRecord(**{**defaults, **fields})  # type: ignore[arg-type]


ROOT = a_span()
PROBLEMS = {
    "an orphan": ([ROOT, a_span(span_id="2", parent_id="9")], "orphan"),
    "two roots": ([ROOT, a_span(span_id="2")], "2 roots"),
    "no root": ([a_span(span_id="2", parent_id="2")], "0 roots"),
    "one id twice": ([ROOT, a_span(parent_id="1")], "share an id"),
    "an early child": (
        [ROOT, a_span(span_id="2", parent_id="1", start_s=0.9)],
        "before its parent",
    ),
    "an end before the start": ([a_span(end_s=0.5)], "ends before"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_tree_problems_finds(case: str) -> None:
    spans, problem = PROBLEMS[case]
    assert any(problem in found for found in tree_problems(spans))


def test_tree_problems_of_a_running_trace_are_only_the_announced_root() -> None:
    start = a_span(span_id="2", parent_id="1", name="session.start")
    stray = a_span(span_id="3", parent_id="8", name="call")
    assert tree_problems([start], running={"t"}) == []
    assert any("orphan" in found for found in tree_problems([start, stray], running={"t"}))


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_are_made_once_and_printed() -> None:
    metrics = a_telemetry("").metrics
    metrics.counter("talaria_calls", "Calls.", ("source",)).labels("header").inc()
    metrics.counter("talaria_calls", "Calls.", ("source",)).labels("header").inc()
    metrics.gauge("talaria_calls_in_flight", "Open calls.").set(3)
    metrics.histogram("talaria_sct_seconds", "SCT.").observe(0.2)
    text = metrics.text().decode()
    assert 'talaria_calls_total{source="header"} 2.0' in text
    assert "talaria_calls_in_flight 3.0" in text
    assert 'talaria_sct_seconds_bucket{le="0.25"} 1.0' in text
    with pytest.raises(ValueError, match="is a Gauge"):
        metrics.counter("talaria_calls_in_flight", "No.")


def test_services_of_one_process_have_metrics_of_their_own() -> None:
    one, two = a_telemetry("", "gateway"), a_telemetry("", "router")
    one.metrics.gauge("talaria_x", "X.").set(1)
    two.metrics.gauge("talaria_x", "X.").set(2)
    assert b"talaria_x 1.0" in one.metrics.text()


# --- logs ---------------------------------------------------------------------------------------


def test_a_record_is_one_line_with_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    logs.set_up("info")
    logs.set_up("info")
    log = logging.getLogger("talaria_router.service")
    log.debug("not shown")
    log.info("placed\nhere", extra={"call_id": "c1", "why": 'a "b" c'})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    placed, failed = written.getvalue().splitlines()
    assert placed.endswith(r'INFO talaria_router.service placed\nhere call_id=c1 why="a \"b\" c"')
    assert "ValueError: two" in failed
    assert "ERROR" in failed
