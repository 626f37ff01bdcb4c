"""What admission measures and traces: decisions, leases, sessions and where their time went. IO."""

from __future__ import annotations

import msgspec

from talaria_admission.events import LeaseOver, SessionOver, SessionStarted, ToolGap
from talaria_admission.policy import Admission
from talaria_common import attributes as at
from talaria_common.telemetry import Telemetry
from talaria_common.wire import Granted, NotGranted, PlaceCall

STEP_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.05)


class Teller:
    """Metrics and spans of one admission."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._spans = telemetry.spans
        metrics = telemetry.metrics
        self._decisions = metrics.counter(
            "talaria_admission_decisions", "AdmitCalls, by reason or error code", ("outcome",)
        )
        self._admit_s = metrics.histogram(
            "talaria_admission_decision_seconds", "Deciding one AdmitCall", buckets=STEP_BUCKETS_S
        )
        self._leases = metrics.counter(
            "talaria_admission_leases", "Leases that are over, by how", ("outcome",)
        )
        self._lease_charge = metrics.counter(
            "talaria_admission_lease_charge_seconds",
            "Charge times holding time of leases: expired and voided ones are waste",
            ("outcome",),
        )
        self._grants_open = metrics.gauge("talaria_admission_grants_open", "Attempts not ended")
        self._leases_live = metrics.gauge("talaria_admission_leases_live", "Leases held now")
        self._sessions_open = metrics.gauge("talaria_sessions_open", "Sessions not ended")
        self._sessions = metrics.counter("talaria_sessions_ended", "Sessions, by end", ("end",))
        self._sct_s = metrics.histogram("talaria_session_sct_seconds", "Session completion time")
        self._part_s = metrics.histogram(
            "talaria_session_part_seconds", "Where a session's wall time went", ("part",)
        )
        self._overlapped_s = metrics.histogram(
            "talaria_session_overlapped_seconds", "Time of calls that others overlapped"
        )
        self._calls = metrics.histogram(
            "talaria_session_calls",
            "Accepted calls of a session",
            buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500),
        )
        self._gap_s = metrics.histogram(
            "talaria_tool_gap_seconds", "Between a call's last token and the next arrival"
        )

    def decided(
        self,
        place: PlaceCall,
        answer: Granted | NotGranted,
        took_s: float,
        start_unix_s: float,
        end_unix_s: float,
    ) -> None:
        """One AdmitCall is answered."""
        outcome = answer.reason.value if isinstance(answer, Granted) else answer.error.code
        self._decisions.labels(outcome).inc()
        self._admit_s.observe(took_s)
        if not self._spans.is_on or not isinstance(answer, Granted):
            return
        grant = answer.grant
        attributes = {
            at.REASON: answer.reason.value,
            at.INSTANCE: grant.instance,
            at.EPOCH: grant.epoch,
            at.GRANT: grant.n,
            at.LEASE_OF: grant.lease_of,
            at.CHARGE_S: grant.charge_s,
            at.CALL_INDEX: answer.call_index,
            at.IS_CONTINUATION: answer.is_continuation,
        }
        self._spans.part(
            place.tenant, answer.session, place.key, "admit", start_unix_s, end_unix_s, attributes
        )

    def lease_over(self, effect: LeaseOver) -> None:
        self._leases.labels(effect.outcome.value).inc()
        self._lease_charge.labels(effect.outcome.value).inc(effect.charge_seconds)

    def session_started(self, effect: SessionStarted) -> None:
        self._spans.session_start(
            effect.tenant,
            effect.session,
            effect.started_unix_s,
            {at.REQUEST_MODEL: effect.model, at.SESSION_PARENT: effect.parent},
        )

    def tool_gap(self, effect: ToolGap) -> None:
        gap_s = effect.end_unix_s - effect.start_unix_s
        self._gap_s.observe(gap_s)
        self._spans.part(
            effect.tenant,
            effect.session,
            None,
            "tool_gap",
            effect.start_unix_s,
            effect.end_unix_s,
            {at.TOOL_GAP_S: gap_s},
        )

    def session_over(self, effect: SessionOver) -> None:
        """Write the root span and the session's account."""
        row = effect.row
        self._sessions.labels(effect.end.value).inc()
        self._sct_s.observe(row.sct_s)
        self._overlapped_s.observe(row.overlapped_s)
        self._calls.observe(row.calls)
        for name, part_s in msgspec.structs.asdict(row.parts).items():
            self._part_s.labels(name.removesuffix("_s")).observe(part_s)
        self._spans.session_root(
            row.tenant,
            row.id,
            row.started_unix_s,
            max(row.last_unix_s, row.started_unix_s + row.sct_s),
            {
                at.SESSION_SOURCE: row.source,
                at.SESSION_PARENT: row.parent,
                at.SESSION_CALLS: row.calls,
                at.SESSION_END: effect.end.value,
                at.REQUEST_MODEL: row.model,
                at.INPUT_TOKENS: row.usage.prompt_tokens,
                at.OUTPUT_TOKENS: row.usage.completion_tokens,
                at.CACHED_TOKENS: row.usage.cached_tokens,
                at.SCT_S: row.sct_s,
                at.TOOL_GAP_S: row.parts.tool_gap_s,
                at.OVERLAPPED_S: row.overlapped_s,
                at.UNATTRIBUTED_S: row.parts.unattributed_s,
            },
        )

    def tables(self, policy: Admission) -> None:
        """Set the gauges."""
        books = policy.books
        self._grants_open.set(sum(len(v.open) for v in books.account.instances.values()))
        self._leases_live.set(len(books.account.leases))
        self._sessions_open.set(books.sessions.open_count)
