"""Session queries, the backup's rows, and what time does to the tables. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

from talaria_admission.books import Books
from talaria_admission.events import Loaded, SessionOver
from talaria_admission.sessions import SessionEnd
from talaria_common.wire import (
    CallKey,
    EndSession,
    ErrorInfo,
    GetSession,
    GetSessions,
    NotGranted,
    SessionList,
)

NO_CALL: Final = CallKey("none")
"""Key of a NotGranted that answers a session query."""

Query: TypeAlias = GetSessions | GetSession | EndSession


def answer(books: Books, query: Query, now_s: float) -> SessionList | NotGranted:
    """A tenant's sessions, or one of them; ending one closes it first."""
    if isinstance(query, GetSessions):
        found = books.sessions.of_tenant(query.tenant, query.limit)
        return SessionList(sessions=tuple(s.row(books.epoch) for s in found))
    session = books.sessions.get(query.tenant, query.session)
    if session is None:
        detail = f"no session {query.session!r}"
        return NotGranted(key=NO_CALL, error=ErrorInfo(code="unknown_session", detail=detail))
    if isinstance(query, EndSession):
        books.close_session(session, SessionEnd.ENDED, now_s)
    return SessionList(sessions=(session.row(books.epoch),), decisions=tuple(session.decisions))


def load(books: Books, event: Loaded, now_s: float) -> None:
    """Start from the backup."""
    books.unix_offset_s = event.unix_s - now_s
    for row in event.rows:
        if books.sessions.get(row.tenant, row.id) is None:
            books.sessions.restore(row, now_s)


def close_all(books: Books) -> None:
    """Tell the open sessions as far as they have come; a restarted leader goes on with them."""
    for session in books.sessions:
        if not session.is_over:
            end = session.end or SessionEnd.SHUTDOWN
            books.out.append(SessionOver(row=session.row(books.epoch), end=end))


def sweep(books: Books, now_s: float) -> None:
    """End idle sessions, forget what has had its time."""
    config = books.config
    for session in [s for s in books.sessions if not s.is_closed and not s.open_calls]:
        if now_s - session.touched_s >= config.session_idle_s:
            session.unsettled.clear()
            books.close_session(session, SessionEnd.IDLE, now_s)
    closed = sorted((s for s in books.sessions if s.is_closed), key=lambda s: -s.closed_s)
    for n, session in enumerate(closed):
        books.finish_session(session, now_s)
        is_old = now_s - session.closed_s >= config.session_keep_s
        if session.is_over and (is_old or n >= config.closed_sessions_max):
            books.sessions.remove(session)
            books.changed(session)
    for call in list(books.account.calls.values()):
        if now_s - call.touched_s >= config.tombstone_s and call.open_grant is None:
            books.account.forget(call)
            if call.session is not None:
                call.session.unsettled.pop(call.call_id, None)
    for call_id, until_s in list(books.tombstones.items()):
        if now_s < until_s:
            break
        del books.tombstones[call_id]
