"""The session table, and which session a call belongs to (protocols 6). Pure.

A call with an id belongs to that id (per tenant); the id of a closed session starts anew. A call
without one is found by its message chain, in this order:

    extends   the longest last prompt that it goes on from (not past an unfinished reply)
    equals    a last prompt, while nothing of that session is in flight: a repeat
    fork      goes on from an older prompt of a session, or past one whose reply is not out yet
    new       anything else: an equal opening while the first runs, an old opening run again
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from talaria_admission.sct import SctAccount, Totals
from talaria_common.errors import InvariantBroken
from talaria_common.wire import Decision, Granted, Link, PlaceCall, SessionRow, SessionSource, Usage

HISTORY_MAX: Final = 64
"""Earlier prompts of a session that a fork can start from; as many as a chain has links."""
DECISIONS_MAX: Final = 512

SessionKey: TypeAlias = tuple[str, str]
"""Tenant and session id."""
_ChainKey: TypeAlias = tuple[str, str, bytes]
"""Tenant, model and link digest."""
Kind: TypeAlias = Literal["root", "child", "fork"]


class SessionEnd(StrEnum):
    """Why a session is over."""

    FINAL = "final"
    """Its caller marked the last call."""
    ENDED = "ended"
    """Asked for."""
    IDLE = "idle"
    EVICTED = "evicted"
    """The table was full and it was the longest idle one."""
    SHUTDOWN = "shutdown"


@dataclass(slots=True, eq=False)
class Session:
    """One agent run. Unix times are the front door's, `_s` times this process's."""

    id: str
    tenant: str
    source: SessionSource
    started_unix_s: float
    last_unix_s: float
    touched_s: float
    sct: SctAccount
    parent: str | None = None
    kind: Kind = "root"
    model: str = ""
    instance: str | None = None
    calls_granted: int = 0
    calls_accepted: int = 0
    usage: Usage = field(default_factory=Usage)
    tail: Link | None = None
    tail_call: str = ""
    """The call whose prompt ends at `tail`."""
    replies: deque[bytes] = field(default_factory=lambda: deque(maxlen=4))
    """Chain digests after recent replies: tell apart sessions with the same last prompt."""
    history: deque[_ChainKey] = field(default_factory=deque)
    open_calls: dict[str, Link | None] = field(default_factory=dict)
    """Calls with an open grant, and where their prompts end."""
    unsettled: dict[str, float] = field(default_factory=dict)
    """Granted calls without the front door's account yet, by their arrival (wall clock)."""
    gap_until_unix_s: float | None = None
    """A call arrived while the account of the one before it was still on its way."""
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=DECISIONS_MAX))
    end: SessionEnd | None = None
    closed_s: float = 0.0
    is_over: bool = False
    """Closed and told: its root span is written."""

    @property
    def key(self) -> SessionKey:
        return self.tenant, self.id

    @property
    def is_closed(self) -> bool:
        return self.end is not None

    def returned_call(self, links: Sequence[Link]) -> str | None:
        """The open call whose finished reply this chain goes on from; the latest such call."""
        calls = {tail.digest: c for c, tail in self.open_calls.items() if tail is not None}
        for link, after in itertools.pairwise(reversed(links)):
            if link.is_reply and after.digest in calls:
                return calls[after.digest]
        return None

    def decided(self, granted: Granted) -> None:
        """Keep why a call went where it went."""
        grant = granted.grant
        self.decisions.append(
            Decision(
                call_id=grant.key.call_id,
                attempt=grant.key.attempt,
                call_index=granted.call_index,
                model=grant.model,
                instance=grant.instance,
                reason=granted.reason.value,
                cost=granted.cost,
                runner_up=granted.runner_up,
                runner_up_cost=granted.runner_up_cost,
            )
        )

    def row(self, epoch: int) -> SessionRow:
        """The session's document."""
        totals = self.sct.totals()
        return SessionRow(
            id=self.id,
            tenant=self.tenant,
            source=self.source,
            parent=self.parent,
            kind=self.kind,
            state="closed" if self.is_closed else "open",
            model=self.model,
            calls=self.calls_accepted,
            in_flight=len(self.open_calls),
            instance=self.instance,
            epoch=epoch,
            started_unix_s=self.started_unix_s,
            last_unix_s=self.last_unix_s,
            tail=self.tail,
            usage=self.usage,
            sct_s=totals.sct_s,
            overlapped_s=totals.overlapped_s,
            parts=totals.parts,
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """Whose call it is: a session of the table, or what a new one would be."""

    session: Session | None
    source: SessionSource
    parent: str | None = None
    kind: Kind = "root"


class SessionTable:
    """All sessions, open and recently closed; only open ones are found by a chain."""

    def __init__(self) -> None:
        self._by_key: dict[SessionKey, Session] = {}
        self._tails: dict[_ChainKey, dict[str, Session]] = {}
        self._history: dict[_ChainKey, dict[str, Session]] = {}
        self._open = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    @property
    def open_count(self) -> int:
        return self._open

    def get(self, tenant: str, session: str) -> Session | None:
        return self._by_key.get((tenant, session))

    def of_tenant(self, tenant: str, limit: int) -> list[Session]:
        """A tenant's sessions, latest first."""
        own = (s for s in self._by_key.values() if s.tenant == tenant)
        return heapq.nsmallest(limit, own, key=lambda s: (-s.last_unix_s, s.id))

    def resolve(self, place: PlaceCall) -> Resolved:
        """Find the call's session; changes nothing."""
        if place.session is not None:
            named = self._by_key.get((place.tenant, place.session))
            if named is not None and not named.is_closed:
                return Resolved(named, place.source)
            kind: Kind = "child" if place.parent else "root"
            return Resolved(None, place.source, place.parent, kind)
        if not place.links:
            return Resolved(None, "none", place.parent, "child" if place.parent else "root")
        found = self._extended(place) or self._equal(place)
        if found is not None:
            return Resolved(found, "derived")
        if place.parent:
            return Resolved(None, "derived", place.parent, "child")
        forked = self._forked(place)
        return Resolved(None, "derived", forked, "root" if forked is None else "fork")

    def open(self, place: PlaceCall, resolved: Resolved, fresh_id: str, now_s: float) -> Session:
        """Enter the new session that `resolved` describes; a closed one of the same id is gone."""
        started_unix_s = place.arrived_unix_s
        session = Session(
            id=place.session or fresh_id,
            tenant=place.tenant,
            source=resolved.source,
            started_unix_s=started_unix_s,
            last_unix_s=started_unix_s,
            touched_s=now_s,
            sct=SctAccount(started_unix_s),
            parent=resolved.parent,
            kind=resolved.kind,
            model=place.model,
        )
        self._enter(session)
        return session

    def restore(self, row: SessionRow, now_s: float) -> Session:
        """Enter a session as its backup knows it; its open calls come from the instances."""
        done = Totals(sct_s=row.sct_s, overlapped_s=row.overlapped_s, parts=row.parts)
        until_unix_s = row.started_unix_s + row.sct_s
        session = Session(
            id=row.id,
            tenant=row.tenant,
            source=row.source,
            started_unix_s=row.started_unix_s,
            last_unix_s=row.last_unix_s,
            touched_s=now_s,
            sct=SctAccount(until_unix_s, done),
            parent=row.parent,
            kind=row.kind,
            model=row.model,
            instance=row.instance,
            calls_granted=row.calls,
            calls_accepted=row.calls,
            usage=row.usage,
        )
        if row.state == "closed":
            session.end, session.closed_s, session.is_over = SessionEnd.ENDED, now_s, True
            self._by_key[session.key] = session
            return session
        self._enter(session)
        self.prompt(session, row.tail, "", row.model)
        return session

    def prompt(self, session: Session, tail: Link | None, call_id: str, model: str) -> None:
        """Note a call's prompt as the session's last one."""
        before, was_of = session.tail, session.model
        session.tail, session.tail_call, session.model = tail, call_id, model
        if session.is_closed:
            return
        if before is not None and (tail is None or tail.digest != before.digest):
            old = (session.tenant, was_of, before.digest)
            _drop(self._tails, old, session)
            _put(self._history, old, session)
            session.history.append(old)
            if len(session.history) > HISTORY_MAX:
                self._forget(session, session.history.popleft())
        if tail is not None:
            _put(self._tails, (session.tenant, model, tail.digest), session)

    def close(self, session: Session, end: SessionEnd, now_s: float) -> None:
        """End the session: it takes no more calls. Idempotent."""
        if session.is_closed:
            return
        session.end, session.closed_s = end, now_s
        self._open -= 1
        if session.tail is not None:
            _drop(self._tails, (session.tenant, session.model, session.tail.digest), session)
        for key in session.history:
            _drop(self._history, key, session)
        session.history.clear()

    def remove(self, session: Session) -> None:
        """Forget a closed session."""
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]

    def longest_idle(self) -> Session | None:
        """The open session without calls in flight that has been idle longest."""
        idle = (s for s in self._by_key.values() if not s.is_closed and not s.open_calls)
        return min(idle, key=lambda s: (s.touched_s, s.key), default=None)

    def check(self) -> None:
        """Raise InvariantBroken unless table and indices agree."""
        open_sessions = {id(s) for s in self._by_key.values() if not s.is_closed}
        if len(open_sessions) != self._open:
            raise InvariantBroken(f"{len(open_sessions)} open sessions, counted {self._open}")
        for index in (self._tails, self._history):
            for key, found in index.items():
                if not found or any(id(s) not in open_sessions for s in found.values()):
                    raise InvariantBroken(f"chain index {key} holds a session that is not open")
        for session in self._by_key.values():
            if session.calls_accepted > session.calls_granted:
                raise InvariantBroken(f"session {session.key} accepted more calls than granted")
            if session.usage.cached_tokens > session.usage.prompt_tokens:
                raise InvariantBroken(f"session {session.key} cached more than it prompted")

    def _enter(self, session: Session) -> None:
        self._by_key[session.key] = session
        self._open += 1

    def _forget(self, session: Session, key: _ChainKey) -> None:
        if key not in session.history:
            _drop(self._history, key, session)

    def _extended(self, place: PlaceCall) -> Session | None:
        links = place.links
        digests = {link.digest for link in links}
        for link, after in zip(reversed(links[:-1]), reversed(links[1:]), strict=True):
            found = self._tails.get((place.tenant, place.model, link.digest), {})
            fitting = [
                s for s in found.values() if after.is_reply or s.tail_call not in s.open_calls
            ]
            if fitting:
                return min(fitting, key=lambda s: _by_fit(s, digests))
        return None

    def _equal(self, place: PlaceCall) -> Session | None:
        found = self._tails.get((place.tenant, place.model, place.links[-1].digest), {})
        return min((s for s in found.values() if not s.open_calls), key=_by_age, default=None)

    def _forked(self, place: PlaceCall) -> str | None:
        """The session whose history the call leaves before its end."""
        for link in reversed(place.links[:-1]):
            key = (place.tenant, place.model, link.digest)
            found = self._history.get(key) or self._tails.get(key)
            if found:
                return min(found.values(), key=_by_age).id
        return None


def _by_age(session: Session) -> tuple[float, str]:
    return session.started_unix_s, session.id


def _by_fit(session: Session, digests: set[bytes]) -> tuple[bool, bool, float, str]:
    """Best first: it gave that very reply, its call is over, it is the oldest."""
    is_other_reply = not any(reply in digests for reply in session.replies)
    return (is_other_reply, session.tail_call in session.open_calls, *_by_age(session))


def _put(index: dict[_ChainKey, dict[str, Session]], key: _ChainKey, session: Session) -> None:
    index.setdefault(key, {})[session.id] = session


def _drop(index: dict[_ChainKey, dict[str, Session]], key: _ChainKey, session: Session) -> None:
    found = index.get(key)
    if found is not None and found.get(session.id) is session:
        del found[session.id]
        if not found:
            del index[key]
