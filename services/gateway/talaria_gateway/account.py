"""The account of one call: what it took, how it ended; metrics, spans and CallSettled. IO.

Times are measured where they pass, none is computed by subtraction (protocols 13).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from talaria_common import attributes as names
from talaria_common import subjects, wire
from talaria_common.clock import Clock
from talaria_common.telemetry import Telemetry
from talaria_common.wire import CallKey, CallParts, CallSettled, Granted, Link, Usage
from talaria_gateway.identity import Identity
from talaria_gateway.retry import RetryReason
from talaria_gateway.validate import CheckedCall

FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A call as a door hands it over: checked in form, with its identity."""

    call_id: str
    request_id: str
    checked: CheckedCall
    """Without its parsed body."""
    links: tuple[Link, ...]
    """The end of its message chain."""
    identity: Identity
    tenant: str
    arrived_s: float
    """On this process's clock."""
    arrived_unix_s: float


@dataclass
class Tally:
    """What is measured of one call while it lives; seconds."""

    gateway_s: float = 0.0
    place_s: float = 0.0
    admit_s: float = 0.0
    transfer_s: float = 0.0
    """From sending the body to acceptance; of lost attempts, until they were given up."""
    parts: CallParts = field(default_factory=CallParts)
    deliver_s: float = 0.0
    ttft_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    attempts: int = 1
    granted: Granted | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def add_parts(self, parts: CallParts) -> None:
        """One more attempt's time on its instance."""
        mine, more = msgspec.structs.asdict(self.parts), msgspec.structs.asdict(parts)
        self.parts = CallParts(**{name: mine[name] + more[name] for name in mine})


class Account:
    """Where settled calls are written down."""

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        metrics = telemetry.metrics
        self._clock = clock
        self._spans = telemetry.spans
        self._calls = metrics.counter(
            "talaria_calls_total",
            "Calls by how their session was found and how they ended",
            ("source", "outcome"),
        )
        self._retries = metrics.counter(
            "talaria_call_retries_total", "Attempts that were followed by another", ("reason",)
        )
        self._ignored = metrics.counter(
            "talaria_foreign_ids_ignored_total", "Unusable ids in foreign headers and fields"
        )
        self._ttft = metrics.histogram(
            "talaria_call_ttft_seconds", "Arrival to first token", ("model",)
        )
        self._seconds = metrics.histogram(
            "talaria_call_seconds", "Arrival to last token, finished calls", ("model",)
        )

    def ignored_ids(self, count: int) -> None:
        if count:
            self._ignored.inc(count)

    def retried(self, reason: RetryReason) -> None:
        self._retries.labels(reason.value).inc()

    def refused(self, source: str, code: str) -> None:
        """A call that was no call: it failed before it was placed."""
        self._calls.labels(source, code).inc()

    def settle(self, ask: Ask, tally: Tally, outcome: str) -> tuple[str, bytes] | None:
        """Write the call down once it is over; the message to publish, if it was ever granted."""
        granted = tally.granted
        source = granted.source if granted else ask.identity.source
        self._calls.labels(source, outcome).inc()
        if granted is None:
            return None
        ended_unix_s = max(self._clock.unix_s(), ask.arrived_unix_s)
        model = granted.grant.model
        if tally.ttft_s is not None:
            self._ttft.labels(model).observe(tally.ttft_s)
        if outcome == FINISHED:
            self._seconds.labels(model).observe(ended_unix_s - ask.arrived_unix_s)
        self._write_spans(ask, tally, granted, outcome, ended_unix_s)
        settled = CallSettled(
            key=granted.grant.key,
            tenant=ask.tenant,
            session=granted.session,
            call_index=granted.call_index,
            model=model,
            instance=granted.grant.instance,
            outcome=outcome,
            arrived_unix_s=ask.arrived_unix_s,
            ended_unix_s=ended_unix_s,
            gateway_s=tally.gateway_s,
            place_s=tally.place_s,
            admit_s=tally.admit_s,
            transfer_s=tally.transfer_s,
            parts=tally.parts,
            deliver_s=tally.deliver_s,
            usage=tally.usage,
            attempts=tally.attempts,
            is_final=ask.identity.is_final,
        )
        return subjects.call_settled(ask.call_id), wire.encode(settled)

    def _write_spans(
        self, ask: Ask, tally: Tally, granted: Granted, outcome: str, ended_unix_s: float
    ) -> None:
        if not self._spans.is_on:
            return
        tenant, session, key = ask.tenant, granted.session, granted.grant.key
        began_unix_s = ask.arrived_unix_s
        self._spans.call(
            tenant,
            session,
            key,
            f"{ask.checked.endpoint} {granted.grant.model}",
            began_unix_s,
            ended_unix_s,
            {
                names.OPERATION: "chat" if ask.checked.endpoint == "chat" else "text_completion",
                names.PROVIDER: "talaria",
                names.REQUEST_MODEL: granted.grant.model,
                names.REQUEST_MAX_TOKENS: ask.checked.max_tokens or None,
                names.INPUT_TOKENS: tally.usage.prompt_tokens,
                names.OUTPUT_TOKENS: tally.usage.completion_tokens,
                names.CACHED_TOKENS: tally.usage.cached_tokens,
                names.FINISH_REASONS: tally.finish_reasons or None,
                names.TIME_TO_FIRST_TOKEN: tally.ttft_s,
                names.SESSION_SOURCE: granted.source,
                names.SESSION_PARENT: granted.parent,
                names.CALL_INDEX: granted.call_index,
                names.IS_CONTINUATION: granted.is_continuation,
                names.INSTANCE: granted.grant.instance,
                names.REASON: granted.reason.value,
                names.ATTEMPTS: tally.attempts,
                names.OUTCOME: outcome,
                names.ERROR_TYPE: None if outcome in (FINISHED, CANCELLED) else outcome,
            },
        )
        self._part(tenant, session, key, "gateway", began_unix_s, tally.gateway_s)
        if tally.deliver_s > 0:
            delivered_unix_s = max(ended_unix_s - tally.deliver_s, began_unix_s)
            self._part(tenant, session, key, "deliver", delivered_unix_s, tally.deliver_s)

    def _part(
        self, tenant: str, session: str, key: CallKey, name: str, start_unix_s: float, took_s: float
    ) -> None:
        self._spans.part(tenant, session, key, name, start_unix_s, start_unix_s + took_s, {})
