"""What every part of admission's policy works on, and the changes they have in common. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from talaria_admission.config import AdmissionConfig
from talaria_admission.events import (
    Effect,
    LeaseOutcome,
    LeaseOver,
    RowChanged,
    SendCancel,
    SessionOver,
    ToolGap,
    WakeAt,
)
from talaria_admission.sessions import Session, SessionEnd, SessionKey, SessionTable
from talaria_admission.state import Account, Lease
from talaria_common.policies import PolicySet
from talaria_common.wire import CallKey, LoadState

ACCOUNTS_KEPT: Final = 64
"""Published accounts that a router may still price with: three seconds of them."""
_N_BITS: Final = 32


@dataclass(slots=True)
class PendingCancel:
    """A CancelAttempt without an answer."""

    instance: str
    boot_id: str
    due_s: float


@dataclass(slots=True)
class Books:
    """Tables, the effects of the event at hand, and what they make due."""

    config: AdmissionConfig
    policy: PolicySet
    account: Account = field(default_factory=Account)
    sessions: SessionTable = field(default_factory=SessionTable)
    epoch: int = 0
    is_open: bool = False
    """Rebuilt and deciding."""
    unix_offset_s: float = 0.0
    tombstones: dict[str, float] = field(default_factory=dict)
    """Cancelled calls and until when they are remembered, oldest first."""
    cancels: dict[CallKey, PendingCancel] = field(default_factory=dict)
    out: list[Effect] = field(default_factory=list)
    _granted: int = 0
    _changed: dict[SessionKey, None] = field(default_factory=dict)
    _load: LoadState | None = None
    _load_s: float = float("-inf")
    _load_credit: float = 1.0
    """Accounts that may be published now; grows by one each period, up to the burst."""
    _granted_s: dict[str, float] = field(default_factory=dict)
    _granted_at: dict[int, dict[str, float]] = field(default_factory=dict)
    """Charges granted in all, by instance: now, and when each of the last accounts was published."""
    is_load_due: bool = True
    sweep_due_s: float = 0.0
    _wake_s: float | None = None

    def next_n(self) -> int:
        """Number of the next grant: unique over all epochs."""
        self._granted += 1
        return (self.epoch << _N_BITS) + self._granted

    def unix_s(self, now_s: float) -> float:
        """Wall clock, as far as the shell told it."""
        return now_s + self.unix_offset_s

    def charged_since(self, version: int, instance: str) -> float:
        """Seconds granted on an instance since that account was published; 0 if it is unknown."""
        then = self._granted_at.get(version)
        return 0.0 if then is None else self._granted_s.get(instance, 0.0) - then.get(instance, 0.0)

    # --- changes in common ---

    def charge(self, instance: str, charge_s: float) -> None:
        """A grant was made."""
        self._granted_s[instance] = self._granted_s.get(instance, 0.0) + charge_s
        self.is_load_due = True

    def changed(self, session: Session) -> None:
        """The session's row is to be saved."""
        self._changed[session.key] = None

    def end_lease(self, lease: Lease, outcome: LeaseOutcome, now_s: float) -> None:
        """The lease charges no longer; it never comes back."""
        self.account.remove(lease)
        self.is_load_due = True
        held_s = max(0.0, min(now_s, lease.expires_s) - lease.installed_s)
        self.out.append(LeaseOver(outcome=outcome, charge_seconds=lease.charge_s * held_s))

    def close_session(self, session: Session, end: SessionEnd, now_s: float) -> None:
        """The session takes no more calls and loses its leases."""
        if session.is_closed:
            return
        self.sessions.close(session, end, now_s)
        for lease in self.account.leases_of(session.key):
            self.end_lease(lease, LeaseOutcome.VOIDED, now_s)
        self.changed(session)
        self.finish_session(session, now_s)

    def finish_session(self, session: Session, now_s: float, *, is_forced: bool = False) -> None:
        """Tell the end of a closed session once its calls are settled, or when told not to wait."""
        if session.end is None or session.is_over:
            return
        is_settled = not session.unsettled and not session.open_calls
        if is_settled or is_forced or now_s - session.closed_s >= self.config.session_settle_s:
            session.is_over = True
            self.out.append(SessionOver(row=session.row(self.epoch), end=session.end))
            self.changed(session)

    def gap(self, session: Session, until_unix_s: float) -> None:
        """Tell the tool gap before a call that arrived at `until_unix_s`."""
        start_unix_s = session.sct.last_end_s
        if until_unix_s > start_unix_s:
            self.out.append(
                ToolGap(
                    tenant=session.tenant,
                    session=session.id,
                    start_unix_s=start_unix_s,
                    end_unix_s=until_unix_s,
                )
            )

    def cancel_attempt(self, instance: str, boot_id: str, key: CallKey, now_s: float) -> None:
        """Ask for the attempt's end, again each 0.5 s until it is answered."""
        if key not in self.cancels:
            due_s = now_s + self.config.cancel_repeat_s
            self.cancels[key] = PendingCancel(instance, boot_id, due_s)
            self.out.append(SendCancel(instance=instance, key=key))

    # --- the end of a step ---

    def woken(self) -> None:
        """The last wake-up has been used."""
        self._wake_s = None

    def flush(self, now_s: float) -> list[Effect]:
        """The effects of this step, with saves, the account and the next wake-up added."""
        self.out += [RowChanged(tenant=t, session=s) for t, s in self._changed]
        self._changed.clear()
        if self.is_open:
            self._publish_load(now_s)
            due_s = min([self.sweep_due_s, *(c.due_s for c in self.cancels.values())])
            if self.is_load_due:
                due_s = min(due_s, now_s + self._until_load_s(now_s))
            if due_s != self._wake_s:
                self._wake_s = due_s
                self.out.append(WakeAt(at_s=due_s))
        out, self.out = self.out, []
        return out

    def _until_load_s(self, now_s: float) -> float:
        """Seconds until an account may be published: 20/s, and a few more in a burst."""
        period_s = self.config.load_period_s
        credit = self._load_credit + (now_s - self._load_s) / period_s
        return max(0.0, (1.0 - credit) * period_s)

    def _publish_load(self, now_s: float) -> None:
        age_s = now_s - self._load_s
        is_due = self.is_load_due and self._until_load_s(now_s) <= 0
        if not is_due and age_s < self.config.load_heartbeat_s:
            return
        before = self._load
        version = max(before.version if before else 0, self.epoch << _N_BITS) + 1
        load = self.account.load(self.epoch, version, now_s)
        self.is_load_due = False
        is_news = (
            before is None
            or (before.epoch, before.instances) != (load.epoch, load.instances)
            or age_s >= self.config.load_heartbeat_s
        )
        if is_news:
            credit = self._load_credit + age_s / self.config.load_period_s
            self._load_credit = min(float(self.config.load_burst), credit) - 1.0
            self._load, self._load_s = load, now_s
            self._granted_at[version] = dict(self._granted_s)
            if len(self._granted_at) > ACCOUNTS_KEPT:
                del self._granted_at[next(iter(self._granted_at))]
            self.out.append(load)
