"""The one account of load: instances, grants and leases (protocols 2 and 4). Pure.

    GRANTED ──listed or answered──▶ ACCEPTED ──CallEnded, `ended` list──▶ ENDED
       │  ▲                            │
       │  └──────────────┐             │ its instance no longer lists it, or is gone
       └──in no list──▶ VOID ◀─────────┘
                         │ a snapshot lists it: open again
                         └── CallEnded: ENDED

A grant is *open* while GRANTED or ACCEPTED; a call has at most one open grant. Load of an instance
= the remaining seconds of its snapshot + charges of open grants it does not list + live leases, so
loss, repetition and reordering of CallEnded cannot leak a charge. Sums are made anew from the open
entries: at rest they are exactly zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from talaria_admission.sessions import Session, SessionKey
from talaria_common.errors import InvariantBroken
from talaria_common.wire import (
    CallKey,
    Grant,
    Granted,
    Home,
    InstanceLoad,
    Link,
    LoadState,
    NotGranted,
    PlaceReason,
    Snapshot,
    Tier,
)

RESTORABLE: Final[frozenset[Tier]] = frozenset(("device", "host"))


class GrantStage(StrEnum):
    """See the diagram above."""

    GRANTED = "granted"
    ACCEPTED = "accepted"
    VOID = "void"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Call:
    """What is known of a call over all its attempts; kept until 60 s after its last word."""

    call_id: str
    session: Session | None
    """None: it has no grant yet."""
    index: int
    attempt: int
    """The highest seen."""
    touched_s: float
    answer: Granted | NotGranted | None = None
    """To the highest attempt."""
    is_accepted: bool = False
    is_final: bool = False
    is_settled: bool = False
    """The front door has told what became of it."""
    grants: dict[int, GrantRow] = field(default_factory=dict)

    @property
    def open_grant(self) -> GrantRow | None:
        return next((row for row in self.grants.values() if row.is_open), None)

    def rebuilt_answer(self) -> Granted | None:
        """What the leader before this one answered, as far as the instances tell."""
        row, session = self.grants.get(self.attempt), self.session
        if row is None or session is None:
            return None
        return Granted(
            grant=row.grant,
            session=session.id,
            source=session.source,
            call_index=self.index,
            parent=session.parent,
            reason=PlaceReason.REPEATED,
            is_continuation=self.index > 0,
            started_unix_s=session.started_unix_s,
        )


@dataclass(slots=True, eq=False)
class GrantRow:
    """One grant and how far its attempt has come."""

    grant: Grant
    call: Call
    tail: Link | None
    body_bytes: int
    issued_s: float
    void_after_s: float
    """Accept timeout + 1 s."""
    stage: GrantStage = GrantStage.GRANTED
    is_listed: bool = False
    """In its instance's latest snapshot: charged there."""
    is_reported: bool = False
    """Its CallEnded, or its entry in `ended`, has been taken."""
    makes_no_lease: bool = False
    """Its lease was consumed before its end was heard, or must never be."""

    @property
    def is_open(self) -> bool:
        return self.stage in (GrantStage.GRANTED, GrantStage.ACCEPTED)


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A soft reservation for a likely return: a charge, no pin, no guarantee."""

    n: int
    """The grant whose end installed it."""
    instance: str
    boot_id: str
    session: SessionKey
    model: str
    tail: Link | None
    reply: bytes
    tier: Tier
    """Of the prefix when the call ended."""
    charge_s: float
    installed_s: float
    expires_s: float

    def fits(self, links: Sequence[Link]) -> bool:
        """The chain goes on from the prompt that installed it."""
        return self.tail is None or any(link.digest == self.tail.digest for link in links)

    def has_prefix(self, view: InstanceView, home: Home | None) -> bool:
        """The leased prefix is on the instance's device or restorable there, as last told."""
        if home is not None and home.instance == self.instance and home.tier in RESTORABLE:
            return True
        digests = (self.reply, self.tail.digest if self.tail else b"")
        if any(view.prefixes.get(digest) in RESTORABLE for digest in digests):
            return True
        # No snapshot since the call ended: what the call's end said still holds.
        return view.heard_s <= self.installed_s


@dataclass(slots=True, eq=False)
class InstanceView:
    """What admission knows of one instance."""

    snapshot: Snapshot
    heard_s: float
    is_gone: bool = False
    dead_boots: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    prefixes: dict[bytes, Tier] = field(default_factory=dict)
    open: dict[CallKey, GrantRow] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return self.snapshot.instance

    @property
    def boot_id(self) -> str:
        return self.snapshot.boot_id

    @property
    def takes_work(self) -> bool:
        return self.snapshot.is_ready and not self.snapshot.is_draining and not self.is_gone

    def unlisted(self) -> Iterable[GrantRow]:
        """Open grants that the snapshot does not count."""
        return (row for row in self.open.values() if not row.is_listed)

    def committed_s(self, now_s: float) -> float:
        """Charges beyond the snapshot: grants it does not list, and live leases."""
        grants_s = sum(row.grant.charge_s for row in self.unlisted())
        return grants_s + sum(le.charge_s for le in self.leases.values() if now_s < le.expires_s)

    def wait_s(self, now_s: float) -> float:
        """Predicted seconds before a new call's prefill: what is queued, and what is granted since.

        Not all work that is left: a new call joins the decode of those that run.
        """
        return sum(model.queued_s for model in self.snapshot.models) + self.committed_s(now_s)


class Account:
    """All instances, grants and leases; each change is one method."""

    def __init__(self) -> None:
        self.instances: dict[str, InstanceView] = {}
        self.calls: dict[str, Call] = {}
        self.leases: dict[int, Lease] = {}
        self._by_session: dict[SessionKey, dict[int, Lease]] = {}
        self._gone_leases: set[int] = set()

    # --- instances ---

    def view(self, instance: str) -> InstanceView | None:
        return self.instances.get(instance)

    def hear(self, snapshot: Snapshot, now_s: float) -> InstanceView | None:
        """Take a snapshot; None for one that is out of date or of a boot that is over."""
        view = self.instances.get(snapshot.instance)
        if view is None:
            view = self.instances[snapshot.instance] = InstanceView(snapshot, now_s)
        elif snapshot.boot_id in view.dead_boots:
            return None
        elif snapshot.boot_id != view.boot_id:
            view.dead_boots.append(view.boot_id)
        elif snapshot.version < view.snapshot.version:
            return None
        view.snapshot, view.heard_s, view.is_gone = snapshot, now_s, False
        view.prefixes = {held.digest: held.tier for held in snapshot.prefixes}
        return view

    # --- grants ---

    def issue(self, row: GrantRow) -> None:
        """Enter a new grant, open."""
        held = row.call.open_grant
        if held is not None:
            raise InvariantBroken(f"{row.grant.key} granted while {held.grant.key} is open")
        row.call.grants[row.grant.key.attempt] = row
        self._open(row)

    def accept(self, row: GrantRow) -> bool:
        """The instance has it; True if that changes the session's row."""
        if row.stage is GrantStage.GRANTED:
            row.stage = GrantStage.ACCEPTED
        call, session = row.call, row.call.session
        is_first, call.is_accepted = not call.is_accepted, True
        if session is None:
            return False
        session.calls_accepted += is_first
        # A call that an earlier leader granted may come to light late.
        session.calls_granted = max(session.calls_granted, session.calls_accepted)
        is_latest = row.grant.key.attempt == call.attempt
        is_moved = is_latest and session.instance != row.grant.instance
        if is_moved:
            session.instance = row.grant.instance
        return is_first or is_moved

    def reopen(self, row: GrantRow, stage: GrantStage) -> None:
        """A void grant turns out to be alive."""
        if row.call.open_grant is None:
            row.stage = stage
            self._open(row)

    def close(self, row: GrantRow, stage: GrantStage, now_s: float) -> None:
        """The grant is void or has ended; a later stage only. Idempotent."""
        if row.is_open:
            view = self.instances.get(row.grant.instance)
            if view is not None:
                view.open.pop(row.grant.key, None)
            if row.call.session is not None:
                row.call.session.open_calls.pop(row.call.call_id, None)
        if row.stage is not GrantStage.ENDED:
            row.stage = stage
        row.call.touched_s = now_s

    # --- leases ---

    def install(self, lease: Lease) -> bool:
        """Enter a lease; False if that grant has had its lease."""
        view = self.instances.get(lease.instance)
        if view is None or lease.n in self.leases or lease.n in self._gone_leases:
            return False
        self.leases[lease.n] = view.leases[lease.n] = lease
        self._by_session.setdefault(lease.session, {})[lease.n] = lease
        return True

    def lease_for(
        self, session: Session, model: str, links: Sequence[Link], now_s: float
    ) -> Lease | None:
        """The live lease that this call returns to; the latest, if there are several.

        It is that of the prompt which the call goes on from. While nothing of the session is in
        flight it may be another one: the agent has rewritten its history, and parallel calls,
        which have leases of their own, there are none.
        """
        own = self._by_session.get(session.key, {}).values()
        live = [le for le in own if now_s < le.expires_s and le.model == model]
        fitting = [le for le in live if le.fits(links)]
        if not fitting and not session.open_calls:
            fitting = live
        return max(fitting, key=lambda le: le.n, default=None)

    def leases_of(self, session: SessionKey) -> list[Lease]:
        return list(self._by_session.get(session, {}).values())

    def remove(self, lease: Lease) -> None:
        """The lease is consumed, void or expired: it never comes back."""
        self._gone_leases.add(lease.n)
        del self.leases[lease.n]
        self.instances[lease.instance].leases.pop(lease.n, None)
        own = self._by_session[lease.session]
        del own[lease.n]
        if not own:
            del self._by_session[lease.session]

    def forget(self, call: Call) -> None:
        """Drop a call that has no open grant."""
        self.calls.pop(call.call_id, None)
        self._gone_leases.difference_update(row.grant.n for row in call.grants.values())

    def forget_instance(self, instance: str) -> None:
        """Drop an instance that has neither open grants nor leases."""
        view = self.instances.get(instance)
        if view is not None and not view.open and not view.leases:
            del self.instances[instance]

    # --- what is published, what must hold ---

    def load(self, epoch: int, version: int, now_s: float) -> LoadState:
        """The account as routers read it."""
        return LoadState(
            epoch=epoch,
            version=version,
            instances=tuple(
                _instance_load(view, now_s) for _, view in sorted(self.instances.items())
            ),
        )

    def check(self) -> None:
        """Raise InvariantBroken unless grants, leases and sessions agree."""
        open_rows = 0
        for call in self.calls.values():
            rows = [row for row in call.grants.values() if row.is_open]
            open_rows += len(rows)
            if len(rows) > 1:
                raise InvariantBroken(f"call {call.call_id} has {len(rows)} open grants")
            for row in rows:
                view = self.instances.get(row.grant.instance)
                if view is None or view.open.get(row.grant.key) is not row:
                    raise InvariantBroken(f"open grant {row.grant.key} is on no instance")
                if call.session is None or call.call_id not in call.session.open_calls:
                    raise InvariantBroken(f"open grant {row.grant.key} is in no session")
        if open_rows != sum(len(view.open) for view in self.instances.values()):
            raise InvariantBroken("an instance holds a grant of a forgotten call")
        if sum(len(view.leases) for view in self.instances.values()) != len(self.leases):
            raise InvariantBroken("leases by instance and in all differ")
        if self._gone_leases & self.leases.keys():
            raise InvariantBroken("a lease that is gone has come back")

    def _open(self, row: GrantRow) -> None:
        view = self.instances[row.grant.instance]
        view.open[row.grant.key] = row
        if row.call.session is not None:
            row.call.session.open_calls[row.call.call_id] = row.tail


def _instance_load(view: InstanceView, now_s: float) -> InstanceLoad:
    by_model_s: dict[str, float] = {}
    unlisted = list(view.unlisted())
    leases = [lease for lease in view.leases.values() if now_s < lease.expires_s]
    for row in unlisted:
        by_model_s[row.grant.model] = by_model_s.get(row.grant.model, 0.0) + row.grant.charge_s
    for lease in leases:
        by_model_s[lease.model] = by_model_s.get(lease.model, 0.0) + lease.charge_s
    return InstanceLoad(
        instance=view.instance,
        committed_s=view.committed_s(now_s),
        committed_blocks=sum(row.grant.charge_blocks for row in unlisted),
        leases=len(leases),
        grants=len(view.open),
        by_model_s=by_model_s,
    )
