"""Keeping the account true to what instances and front doors tell (protocols 1, 2, 4, 7). Pure.

Every message here may be lost, repeated or late: the snapshot's lists are what counts, CallEnded
is the fast path.
"""

from __future__ import annotations

from typing import Final

from talaria_admission.books import Books
from talaria_admission.events import CancelAnswered, LeaseOutcome
from talaria_admission.sessions import Resolved, Session, SessionEnd
from talaria_admission.state import RESTORABLE, Call, GrantRow, GrantStage, InstanceView, Lease
from talaria_common.wire import (
    CallEnded,
    CallSettled,
    CancelCall,
    EndReason,
    Grant,
    Link,
    LiveGrant,
    PlaceCall,
    Snapshot,
    Usage,
)

TOMBSTONES_MAX: Final = 100_000


class Reconciler:
    """Takes reports; decides nothing about placement."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._account = books.account
        self._adopted: list[CallEnded] = []
        """Ends that a leader before this one had leases for, until all lists are read."""
        self._consumed: set[int] = set()
        """Grants whose leases are named in some list as consumed."""
        self._epoch_seen = 0

    # --- snapshots ---

    def hear(self, snapshot: Snapshot, now_s: float) -> None:
        """Bring one instance's grants in line with its lists."""
        is_first = self._account.view(snapshot.instance) is None
        view = self._account.hear(snapshot, now_s)
        if view is None:
            return
        self._raise_epoch(snapshot.epoch_seen)
        self._close_other_boots(view, now_s)
        listed = {e.grant.key: e for e in snapshot.live_grants if _is_of(e.grant, view)}
        ended = [e for e in snapshot.ended if _is_of(e.grant, view)]
        if is_first:
            grants = [*(e.grant for e in listed.values()), *(e.grant for e in ended)]
            self._consumed.update(g.lease_of for g in grants if g.lease_of is not None)
        for live in listed.values():
            self._listed(live, view, now_s)
        for entry in ended:
            self.ended(entry, now_s, is_adopting=is_first)
        for row in list(view.open.values()):
            row.is_listed = row.grant.key in listed
        self._void(view, now_s)
        self._books.is_load_due = True

    def opened(self, epoch: int, now_s: float) -> None:
        """The first lists are in: leases of the former leader that nobody consumed stand again."""
        self._books.epoch = max(epoch, self._epoch_seen + 1)
        self._books.is_open = True
        for entry in self._adopted:
            self._install_lease(entry, now_s)
        self._adopted.clear()

    def _raise_epoch(self, seen: int) -> None:
        self._epoch_seen = max(self._epoch_seen, seen)
        if self._books.is_open and seen > self._books.epoch:
            self._books.epoch = seen + 1

    def _close_other_boots(self, view: InstanceView, now_s: float) -> None:
        """What an earlier boot held is lost, claims of residency and cancels included."""
        for row in [r for r in view.open.values() if r.grant.boot_id != view.boot_id]:
            self._close(row, GrantStage.ENDED, now_s)
        for lease in [le for le in view.leases.values() if le.boot_id != view.boot_id]:
            self._books.end_lease(lease, LeaseOutcome.VOIDED, now_s)

    def _listed(self, live: LiveGrant, view: InstanceView, now_s: float) -> None:
        key = live.grant.key
        call, is_news = self._account.calls.get(key.call_id), False
        if call is None or key.attempt > call.attempt:
            call, is_news = self._adopt_call(live, now_s), True
        row = call.grants.get(key.attempt)
        if row is None and key.attempt == call.attempt and call.open_grant is None:
            row, is_news = self._adopt_grant(live.grant, live.tail, call, now_s), True
        if row is not None:
            if row.stage is GrantStage.VOID and key.attempt == call.attempt:
                self._account.reopen(row, GrantStage.GRANTED)
                is_news = True
            if live.is_accepted and row.is_open:
                is_news = self._account.accept(row) or is_news
            _touch(call, now_s)
        # Snapshots list a call many times: only what changes its session's row is worth saving.
        if is_news and call.session is not None:
            self._books.changed(call.session)
        if key.call_id in self._books.tombstones or key.attempt < call.attempt:
            self._books.cancel_attempt(view.instance, view.boot_id, key, now_s)

    def _void(self, view: InstanceView, now_s: float) -> None:
        for row in list(view.unlisted()):
            if now_s - row.issued_s >= row.void_after_s:
                self._close(row, GrantStage.VOID, now_s)

    # --- ends ---

    def ended(self, entry: CallEnded, now_s: float, *, is_adopting: bool = False) -> None:
        """One accepted attempt is over; each attempt once, from whichever message comes first."""
        key = entry.grant.key
        call = self._account.calls.get(key.call_id)
        row = call.grants.get(key.attempt) if call is not None else None
        is_counted = False
        if row is None and is_adopting and (call is None or key.attempt > call.attempt):
            call = self._adopt_call(entry, now_s)
            row = self._adopt_grant(entry.grant, entry.tail, call, now_s)
            is_counted = call.is_accepted  # the backup knew it already
        if row is None or call is None or row.is_reported:
            return
        row.is_reported = True
        self._account.accept(row)
        self._close(row, GrantStage.ENDED, now_s)
        self._books.cancels.pop(key, None)
        session = call.session
        if session is None or key.attempt != call.attempt:
            return
        if not is_counted:
            session.usage = _add(session.usage, entry.usage)
        if entry.reply:
            session.replies.append(entry.reply)
        _touch(call, now_s)
        is_finished = entry.reason is EndReason.FINISHED
        if is_finished and (entry.is_final or call.is_final):
            self._books.close_session(session, SessionEnd.FINAL, now_s)
        elif is_finished and not row.makes_no_lease:
            if self._books.is_open:
                self._install_lease(entry, now_s)
            else:
                self._adopted.append(entry)

    def _install_lease(self, entry: CallEnded, now_s: float) -> None:
        """Reserve room for the return on the instance that holds the prefix."""
        policy, grant = self._books.policy, entry.grant
        call = self._account.calls.get(grant.key.call_id)
        view = self._account.view(grant.instance)
        lives_s = policy.lease_tau_s - entry.age_s
        if (
            call is None
            or call.session is None
            or call.session.is_closed
            or view is None
            or view.boot_id != grant.boot_id
            or lives_s <= 0
            or entry.prefix_tier not in RESTORABLE
            or grant.key.call_id in self._books.tombstones
            or grant.n in self._consumed
        ):
            return
        lease = Lease(
            n=grant.n,
            instance=grant.instance,
            boot_id=grant.boot_id,
            session=call.session.key,
            model=grant.model,
            tail=entry.tail,
            reply=entry.reply,
            tier=entry.prefix_tier,
            charge_s=policy.lease_charge_s,
            installed_s=now_s,
            expires_s=now_s + lives_s,
        )
        if self._account.install(lease):
            self._books.is_load_due = True

    def settled(self, event: CallSettled, now_s: float) -> None:
        """The front door is done with a call: its time joins the session's partition."""
        call = self._account.calls.get(event.key.call_id)
        session = call.session if call is not None else None
        if session is None:
            session = self._books.sessions.get(event.tenant, event.session)
        if session is None or session.is_over or (call is not None and call.is_settled):
            return
        if call is not None:
            call.is_settled = True
            row = call.open_grant
            if row is not None and row.stage is GrantStage.GRANTED and not row.is_listed:
                self._close(row, GrantStage.VOID, now_s)  # refused: nothing runs
        session.unsettled.pop(event.key.call_id, None)
        session.sct.add(event)
        session.last_unix_s = max(session.last_unix_s, event.ended_unix_s)
        session.touched_s = now_s
        until_unix_s = session.gap_until_unix_s
        if until_unix_s is not None and all(
            arrived >= until_unix_s for arrived in session.unsettled.values()
        ):
            session.gap_until_unix_s = None
            self._books.gap(session, until_unix_s)
        self._books.changed(session)
        if event.is_final or (call is not None and call.is_final):
            self._books.close_session(session, SessionEnd.FINAL, now_s)
        self._books.finish_session(session, now_s)

    # --- cancels ---

    def cancelled(self, event: CancelCall, now_s: float) -> None:
        """The client has left: remember it, and stop the attempt that may be running."""
        tombstones = self._books.tombstones
        tombstones.pop(event.call_id, None)
        tombstones[event.call_id] = now_s + self._books.config.tombstone_s
        if len(tombstones) > TOMBSTONES_MAX:
            del tombstones[next(iter(tombstones))]
        call = self._account.calls.get(event.call_id)
        row = call.open_grant if call is not None else None
        if row is not None:
            grant = row.grant
            self._books.cancel_attempt(grant.instance, grant.boot_id, grant.key, now_s)

    def cancel_answered(self, event: CancelAnswered, now_s: float) -> None:
        """The instance stops it, or never had it and will refuse it."""
        self._books.cancels.pop(event.key, None)
        call = self._account.calls.get(event.key.call_id)
        row = call.grants.get(event.key.attempt) if call is not None else None
        if event.outcome == "unknown" and row is not None and row.is_open:
            self._close(row, GrantStage.ENDED, now_s)

    # --- time ---

    def sweep(self, now_s: float) -> None:
        """Void, expire, and repeat what is due."""
        for view in list(self._account.instances.values()):
            if now_s - view.heard_s >= self._books.config.gone_s and not view.is_gone:
                view.is_gone = True
                for row in list(view.open.values()):
                    row.is_listed = False
                    self._close(row, GrantStage.VOID, now_s)
            self._void(view, now_s)
            if now_s - view.heard_s >= self._books.config.tombstone_s:
                self._account.forget_instance(view.instance)
        for lease in list(self._account.leases.values()):
            if now_s >= lease.expires_s:
                self._books.end_lease(lease, LeaseOutcome.EXPIRED, now_s)
        self._repeat_cancels(now_s)

    def _repeat_cancels(self, now_s: float) -> None:
        for key, pending in list(self._books.cancels.items()):
            view = self._account.view(pending.instance)
            if view is None or view.is_gone or view.boot_id != pending.boot_id:
                del self._books.cancels[key]
            elif now_s >= pending.due_s:
                del self._books.cancels[key]
                self._books.cancel_attempt(pending.instance, pending.boot_id, key, now_s)

    # --- what a leader before this one granted ---

    def _adopt_call(self, entry: LiveGrant | CallEnded, now_s: float) -> Call:
        """A call that this leader did not grant: higher attempt and index win."""
        key = entry.grant.key
        call = self._account.calls.get(key.call_id)
        if call is not None:
            if call.open_grant is not None:
                self._close(call.open_grant, GrantStage.ENDED, now_s)
            call.attempt = key.attempt
            return call
        session = self._adopt_session(entry, now_s)
        call = Call(key.call_id, session, entry.call_index, key.attempt, now_s)
        is_counted = entry.call_index < session.calls_accepted
        call.is_accepted = is_counted
        session.calls_granted = max(session.calls_granted, entry.call_index + 1)
        if entry.call_index + 1 == session.calls_granted:
            self._books.sessions.prompt(session, entry.tail, key.call_id, entry.grant.model)
        self._account.calls[key.call_id] = call
        return call

    def _adopt_session(self, entry: LiveGrant | CallEnded, now_s: float) -> Session:
        session = self._books.sessions.get(entry.tenant, entry.session)
        if session is not None:
            return session
        place = PlaceCall(
            key=entry.grant.key,
            model=entry.grant.model,
            tenant=entry.tenant,
            session=entry.session,
            arrived_unix_s=self._books.unix_s(now_s),
        )
        return self._books.sessions.open(place, Resolved(None, "none"), entry.session, now_s)

    def _adopt_grant(self, grant: Grant, tail: Link | None, call: Call, now_s: float) -> GrantRow:
        row = GrantRow(grant, call, tail, 0, now_s, 0.0)
        row.makes_no_lease = grant.n in self._consumed
        self._account.issue(row)
        return row

    # --- small changes ---

    def _close(self, row: GrantRow, stage: GrantStage, now_s: float) -> None:
        self._account.close(row, stage, now_s)
        self._books.is_load_due = True
        session = row.call.session
        if session is not None:
            self._books.changed(session)
            self._books.finish_session(session, now_s)


def _touch(call: Call, now_s: float) -> None:
    call.touched_s = now_s
    if call.session is not None:
        call.session.touched_s = now_s


def _is_of(grant: Grant, view: InstanceView) -> bool:
    return grant.instance == view.instance and grant.boot_id == view.boot_id


def _add(a: Usage, b: Usage) -> Usage:
    return Usage(
        prompt_tokens=a.prompt_tokens + b.prompt_tokens,
        completion_tokens=a.completion_tokens + b.completion_tokens,
        cached_tokens=a.cached_tokens + b.cached_tokens,
    )
