"""Admission's decisions: who may run where, under which lease, or not now (protocols 1-4). Pure.

`Admission.step` takes one event and returns its effects. An AdmitCall is answered by exactly one
Granted or NotGranted; a session query by one SessionList or NotGranted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from talaria_admission import upkeep
from talaria_admission.books import Books
from talaria_admission.config import AdmissionConfig
from talaria_admission.events import (
    Admit,
    CancelAnswered,
    Closing,
    Effect,
    Event,
    LeaseOutcome,
    Loaded,
    Opened,
    SessionStarted,
    Tick,
)
from talaria_admission.reconcile import Reconciler
from talaria_admission.sessions import Resolved, Session, SessionEnd
from talaria_admission.state import Call, GrantRow, GrantStage, InstanceView
from talaria_common.policies import PolicySet
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    CallKey,
    CallSettled,
    CancelCall,
    Candidate,
    EndSession,
    ErrorInfo,
    GetSession,
    GetSessions,
    Grant,
    Granted,
    NotGranted,
    PlaceCall,
    PlaceReason,
    SessionRow,
    Snapshot,
)

CONTINUATION_FACTOR: Final = 2.0
"""Continuations are rejected only above this multiple of the caps that hold for new sessions."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a call goes and why."""

    view: InstanceView
    reason: PlaceReason
    candidate: Candidate | None
    lease_of: int | None = None


class Admission:
    """The single owner of sessions, leases and the account."""

    def __init__(self, config: AdmissionConfig, policy: PolicySet) -> None:
        self._config = config
        self.books = Books(config, policy)
        self._account = self.books.account
        self._sessions = self.books.sessions
        self._reconciler = Reconciler(self.books)

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Decide about one event."""
        self.books.out.clear()  # what an event that broke an invariant left is nobody's answer
        match event:
            case Admit():
                self._admit(event, now_s)
            case Snapshot():
                self._reconciler.hear(event, now_s)
            case CallEnded():
                self._reconciler.ended(event, now_s)
            case CallSettled():
                self._reconciler.settled(event, now_s)
            case CancelCall():
                self._reconciler.cancelled(event, now_s)
            case CancelAnswered():
                self._reconciler.cancel_answered(event, now_s)
            case GetSessions() | GetSession() | EndSession():
                self.books.out.append(upkeep.answer(self.books, event, now_s))
            case Loaded():
                upkeep.load(self.books, event, now_s)
            case Opened():
                self._reconciler.opened(event.epoch, now_s)
            case Tick():
                self.books.woken()
            case Closing():
                upkeep.close_all(self.books)
            case _:
                assert_never(event)
        if now_s >= self.books.sweep_due_s:
            self._reconciler.sweep(now_s)
            upkeep.sweep(self.books, now_s)
            self.books.sweep_due_s = now_s + self._config.sweep_s
        return self.books.flush(now_s)

    def row(self, tenant: str, session: str) -> SessionRow | None:
        """What the backup should hold for a session; None: nothing."""
        found = self._sessions.get(tenant, session)
        return None if found is None else found.row(self.books.epoch)

    def check(self) -> None:
        """Raise InvariantBroken unless all tables agree."""
        self._account.check()
        self._sessions.check()

    # --- an attempt asks to run ---

    def _admit(self, event: Admit, now_s: float) -> None:
        place = event.call.place
        key = place.key
        if key.call_id in self.books.tombstones:
            self._refuse(key, "cancelled", "the caller has cancelled this call")
            return
        call = self._account.calls.get(key.call_id)
        if call is not None:
            if key.attempt < call.attempt:
                self._refuse(key, "superseded", f"attempt {call.attempt} of this call is known")
                return
            if call.is_settled:
                self._refuse(key, "superseded", "this call is over: another one needs a new id")
                return
            known = call.answer or call.rebuilt_answer()
            if key.attempt == call.attempt and known is not None:
                self.books.out.append(self._repeat(call, known, now_s))
                return
            self._supersede(call, now_s)
        else:
            call = self._account.calls[key.call_id] = Call(key.call_id, None, 0, 1, now_s)
        call.attempt, call.touched_s = key.attempt, now_s
        call.is_final = call.is_final or place.is_final
        call.answer = self._decide(event, call, now_s)
        self.books.out.append(call.answer)

    def _decide(self, event: Admit, call: Call, now_s: float) -> Granted | NotGranted:
        place, session = event.call.place, call.session
        resolved = Resolved(session, place.source if place.session else "derived")
        if session is None:
            resolved = self._sessions.resolve(place)
            session = resolved.session
        choice = self._choose(event.call, session, now_s)
        if isinstance(choice, ErrorInfo):
            return NotGranted(key=place.key, error=choice)
        if session is None:
            if not self._make_room(now_s):
                full = ErrorInfo(
                    code="overloaded", detail="the session table is full", retry_after_s=1.0
                )
                return NotGranted(key=place.key, error=full)
            session = self._open_session(place, resolved, event.fresh_id, now_s)
        if call.session is None:
            self._join(call, session, place, now_s)
        return self._grant(event.call, call, session, resolved, choice, now_s)

    def _repeat(
        self, call: Call, answer: Granted | NotGranted, now_s: float
    ) -> Granted | NotGranted:
        """The earlier outcome; a grant that nobody used yet is good for another accept timeout."""
        if isinstance(answer, NotGranted):
            return answer
        row = call.grants[answer.grant.key.attempt]
        view = self._account.view(row.grant.instance)
        is_usable = view is not None and view.boot_id == row.grant.boot_id and not view.is_gone
        is_unused = row.stage is GrantStage.VOID and not row.is_reported and not call.is_settled
        if is_usable and is_unused:
            self._account.reopen(row, GrantStage.GRANTED)
        if row.stage is GrantStage.GRANTED:
            row.issued_s = now_s
            self.books.is_load_due = True
        return msgspec.structs.replace(answer, reason=PlaceReason.REPEATED)

    def _supersede(self, call: Call, now_s: float) -> None:
        """A later attempt ends all earlier ones, and their leases never come."""
        for row in call.grants.values():
            row.makes_no_lease = True
            self._account.close(row, GrantStage.ENDED, now_s)
        self.books.is_load_due = True

    def _refuse(self, key: CallKey, code: str, detail: str) -> None:
        self.books.out.append(NotGranted(key=key, error=ErrorInfo(code=code, detail=detail)))

    # --- where it goes ---

    def _choose(
        self, event: AdmitCall, session: Session | None, now_s: float
    ) -> Choice | ErrorInfo:
        """Home under a lease, else the first candidate that accepts."""
        place = event.place
        if session is not None:
            home = self._implied(event, session, now_s) or self._leased(event, session, now_s)
            if home is not None:
                return home
        factor = 1.0 if session is None or not session.calls_granted else CONTINUATION_FACTOR
        waits_s: list[float] = []
        for candidate in self._repriced(event):
            view = self._account.view(candidate.instance)
            if (
                view is None
                or not view.takes_work
                or candidate.instance in place.excluded
                or now_s - view.heard_s >= self._config.stale_s
            ):
                continue
            if self._accepts(view, place, factor, now_s):
                return Choice(view, PlaceReason.RANKED, candidate)
            waits_s.append(view.wait_s(now_s))
        if not waits_s:
            detail = f"no instance that serves {place.model} can take the call now"
            return ErrorInfo(code="no_instance", detail=detail, retry_after_s=1.0)
        wait_s = min(waits_s)
        return ErrorInfo(
            code="overloaded",
            detail=f"{wait_s:.0f} s of work are queued for {place.model}",
            retry_after_s=max(1.0, wait_s - factor * self._config.queue_wait_max_s),
        )

    def _repriced(self, event: AdmitCall) -> list[Candidate]:
        """The ranking, with what was granted since the router read the account.

        Routers price calls that arrive together alike; without this they would pile up on one
        instance.
        """

        def price(candidate: Candidate) -> tuple[bool, float]:
            since_s = self.books.charged_since(event.load_version, candidate.instance)
            is_last = candidate.instance in event.place.ranked_last
            return is_last, candidate.cost.total_s + since_s

        return sorted(event.ranked, key=price)

    def _implied(self, event: AdmitCall, session: Session, now_s: float) -> Choice | None:
        """The return overtook its predecessor's CallEnded: that call has finished."""
        returned = session.returned_call(event.place.links)
        before = self._account.calls[returned] if returned is not None else None
        row = before.open_grant if before is not None else None
        if before is None or row is None or row.makes_no_lease:
            return None
        if before.call_id in self.books.tombstones:
            return None
        row.makes_no_lease = True
        self._account.accept(row)
        self._account.close(row, GrantStage.ENDED, now_s)
        self.books.is_load_due = True
        view = self._account.view(row.grant.instance)
        if view is None or not _is_usable(view, event, row.grant.boot_id):
            return None
        candidate = _candidate_on(event, view)
        return Choice(view, PlaceReason.LEASE_IMPLIED, candidate, row.grant.n)

    def _leased(self, event: AdmitCall, session: Session, now_s: float) -> Choice | None:
        """Consume the lease that this call returns to, or drop it."""
        place = event.place
        lease = self._account.lease_for(session, place.model, place.links, now_s)
        if lease is None:
            return None
        view = self._account.instances[lease.instance]
        stands = _is_usable(view, event, lease.boot_id) and lease.has_prefix(view, event.home)
        outcome = LeaseOutcome.CONSUMED if stands else LeaseOutcome.VOIDED
        self.books.end_lease(lease, outcome, now_s)
        if not stands:
            return None
        return Choice(view, PlaceReason.LEASE, _candidate_on(event, view), lease.n)

    def _accepts(self, view: InstanceView, place: PlaceCall, factor: float, now_s: float) -> bool:
        """Waiting is normal: only a wait, a count or a size beyond its cap is refused."""
        config, unlisted = self._config, list(view.unlisted())
        calls = view.snapshot.queued_calls + len(unlisted)
        queued_bytes = view.snapshot.queued_body_bytes + sum(row.body_bytes for row in unlisted)
        return (
            view.wait_s(now_s) <= factor * config.queue_wait_max_s
            and calls < factor * config.queued_calls_max
            and queued_bytes + place.prompt_bytes <= factor * config.queued_bytes_max
        )

    # --- the grant ---

    def _grant(
        self,
        event: AdmitCall,
        call: Call,
        session: Session,
        resolved: Resolved,
        choice: Choice,
        now_s: float,
    ) -> Granted:
        place, view = event.place, choice.view
        priced = choice.candidate or (event.ranked[0] if event.ranked else None)
        grant = Grant(
            epoch=self.books.epoch,
            n=self.books.next_n(),
            key=place.key,
            instance=view.instance,
            boot_id=view.boot_id,
            model=place.model,
            charge_s=priced.charge_s if priced else self.books.policy.lease_charge_s,
            charge_blocks=priced.charge_blocks if priced else 0,
            lease_of=choice.lease_of,
        )
        tail = place.links[-1] if place.links else None
        void_after_s = 1.0 + (
            self._config.accept_timeout_large_s
            if place.prompt_bytes > self._config.large_body_bytes
            else self._config.accept_timeout_s
        )
        self._account.issue(GrantRow(grant, call, tail, place.prompt_bytes, now_s, void_after_s))
        self.books.charge(view.instance, grant.charge_s)
        others = (c for c in event.ranked if c.instance != view.instance)
        runner_up = min(others, key=lambda c: (c.cost.total_s, c.instance), default=None)
        granted = Granted(
            grant=grant,
            session=session.id,
            source=resolved.source,
            call_index=call.index,
            parent=session.parent,
            reason=choice.reason,
            is_continuation=call.index > 0,
            started_unix_s=session.started_unix_s,
            cost=choice.candidate.cost if choice.candidate else None,
            runner_up=runner_up.instance if runner_up else None,
            runner_up_cost=runner_up.cost if runner_up else None,
        )
        session.decided(granted)
        self.books.changed(session)
        return granted

    def _open_session(
        self, place: PlaceCall, resolved: Resolved, fresh_id: str, now_s: float
    ) -> Session:
        if not place.arrived_unix_s:
            place = msgspec.structs.replace(place, arrived_unix_s=self.books.unix_s(now_s))
        old = self._sessions.get(place.tenant, place.session) if place.session else None
        if old is not None:
            self.books.finish_session(old, now_s, is_forced=True)
        session = self._sessions.open(place, resolved, fresh_id, now_s)
        self.books.out.append(
            SessionStarted(
                tenant=session.tenant,
                session=session.id,
                model=place.model,
                parent=session.parent,
                started_unix_s=session.started_unix_s,
            )
        )
        return session

    def _join(self, call: Call, session: Session, place: PlaceCall, now_s: float) -> None:
        """Make the call the session's next one."""
        arrived_unix_s = place.arrived_unix_s or self.books.unix_s(now_s)
        call.session, call.index = session, session.calls_granted
        session.calls_granted += 1
        session.touched_s = now_s
        session.started_unix_s = min(session.started_unix_s, arrived_unix_s)
        session.last_unix_s = max(session.last_unix_s, arrived_unix_s)
        if call.index and not session.unsettled:
            self.books.gap(session, arrived_unix_s)
        elif session.unsettled and session.gap_until_unix_s is None:
            session.gap_until_unix_s = arrived_unix_s
        session.unsettled[call.call_id] = arrived_unix_s
        tail = place.links[-1] if place.links else None
        self._sessions.prompt(session, tail, call.call_id, place.model)

    def _make_room(self, now_s: float) -> bool:
        if self._sessions.open_count < self._config.sessions_max:
            return True
        idle = self._sessions.longest_idle()
        if idle is None:
            return False
        self.books.close_session(idle, SessionEnd.EVICTED, now_s)
        return True


def _is_usable(view: InstanceView, event: AdmitCall, boot_id: str) -> bool:
    """The instance may be sent a return: alive, the same boot, not ruled out by this call."""
    home, place = event.home, event.place
    is_ill = home is not None and home.instance == view.instance and not home.is_healthy
    return (
        view.takes_work
        and view.boot_id == boot_id
        and not is_ill
        and view.instance not in place.excluded
        and view.instance not in place.ranked_last
    )


def _candidate_on(event: AdmitCall, view: InstanceView) -> Candidate | None:
    return next((c for c in event.ranked if c.instance == view.instance), None)
