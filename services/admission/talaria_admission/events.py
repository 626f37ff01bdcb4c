"""What admission decides about, and what comes of it. Pure.

Most events and effects are wire messages; the rest is here. An answer to AdmitCall or to a session
query is an effect of its event: Granted, NotGranted or SessionList.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

from talaria_admission.sessions import SessionEnd
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    CallKey,
    CallSettled,
    CancelCall,
    EndSession,
    GetSession,
    GetSessions,
    Granted,
    LoadState,
    Message,
    NotGranted,
    SessionList,
    SessionRow,
    Snapshot,
)

# --- events -------------------------------------------------------------------------------------


class Loaded(Message, frozen=True, kw_only=True, tag="loaded"):
    """The session table's backup, read before anything is decided."""

    rows: tuple[SessionRow, ...]
    unix_s: float
    """Wall clock now: stands in for arrivals that nobody remembers."""


class Opened(Message, frozen=True, kw_only=True, tag="opened"):
    """The instances have answered, or their time is up: decide from here on."""

    epoch: int
    """Lower bound; an instance that has seen a higher one raises it."""


class Admit(Message, frozen=True, kw_only=True, tag="admit"):
    """A router asks; `fresh_id` names the session if it turns out to be a new one without id."""

    call: AdmitCall
    fresh_id: str


class CancelAnswered(Message, frozen=True, kw_only=True, tag="cancel_answered"):
    """An instance's answer to CancelAttempt."""

    key: CallKey
    outcome: Literal["unknown", "stopped", "tokens"]


class Tick(Message, frozen=True, kw_only=True, tag="tick"):
    """The time of the last WakeAt has come."""


class Closing(Message, frozen=True, kw_only=True, tag="closing"):
    """Graceful stop: open sessions are told as far as they have come; their rows stay open."""


Event: TypeAlias = (
    Admit
    | Snapshot
    | CallEnded
    | CallSettled
    | CancelCall
    | CancelAnswered
    | GetSessions
    | GetSession
    | EndSession
    | Loaded
    | Opened
    | Tick
    | Closing
)

# --- effects ------------------------------------------------------------------------------------


class LeaseOutcome(StrEnum):
    """How a lease ended."""

    CONSUMED = "consumed"
    EXPIRED = "expired"
    VOIDED = "voided"


class LeaseOver(Message, frozen=True, kw_only=True, tag="lease_over"):
    """For the waste share: wasted charge-seconds over all charge-seconds."""

    outcome: LeaseOutcome
    charge_seconds: float
    """Charge times the time it was held."""


class SendCancel(Message, frozen=True, kw_only=True, tag="send_cancel"):
    """Ask an instance to stop one attempt; its answer comes back as CancelAnswered."""

    instance: str
    key: CallKey


class RowChanged(Message, frozen=True, kw_only=True, tag="row_changed"):
    """The backup of this session is out of date, or the session is forgotten."""

    tenant: str
    session: str


class SessionStarted(Message, frozen=True, kw_only=True, tag="session_started"):
    """A session got its first grant."""

    tenant: str
    session: str
    model: str
    parent: str | None
    started_unix_s: float


class SessionOver(Message, frozen=True, kw_only=True, tag="session_over"):
    """A session has ended and its calls are settled."""

    row: SessionRow
    end: SessionEnd


class ToolGap(Message, frozen=True, kw_only=True, tag="tool_gap"):
    """Between two calls of a session nothing was open."""

    tenant: str
    session: str
    start_unix_s: float
    end_unix_s: float


class WakeAt(Message, frozen=True, kw_only=True, tag="wake_at"):
    """Send Tick at this time; replaces the earlier one."""

    at_s: float


Effect: TypeAlias = (
    Granted
    | NotGranted
    | SessionList
    | LoadState
    | LeaseOver
    | SendCancel
    | RowChanged
    | SessionStarted
    | SessionOver
    | ToolGap
    | WakeAt
)
