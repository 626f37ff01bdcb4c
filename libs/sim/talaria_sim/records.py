"""What one replay saw: the client's own measurements, the stack's slots and session documents. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from talaria_common.wire import SlotReport

Outcome = Literal["finished", "cut_by_context", "failed"]


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call, on the client's clock; seconds since the replay's start."""

    index: int
    intended_s: float
    """When it arrives: the end of the previous answer plus the tool gap."""
    first_token_s: float | None = None
    ended_s: float
    outcome: Outcome
    error: str = ""
    times_shed: int = 0
    """Answers 429 before it was taken."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    planned_prompt_tokens: int = 0
    covers_before: bool | None = None
    """Cached tokens cover the previous prompt but for less than one block; None: not an extension."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session's calls, and what the stack says about it."""

    id: str
    label: str
    model: str
    planned_calls: int
    calls: tuple[CallRecord, ...]
    document: dict[str, Any] | None = None
    """Answer of GET /v1/sessions/{id} after its end."""

    @property
    def finished(self) -> tuple[CallRecord, ...]:
        return tuple(call for call in self.calls if call.outcome == "finished")

    @property
    def sct_s(self) -> float | None:
        """First arrival to last token, gaps included; None: no call finished, or one failed."""
        if not self.finished or any(call.outcome == "failed" for call in self.calls):
            return None
        return self.finished[-1].ended_s - self.calls[0].intended_s


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one policy."""

    sessions: tuple[SessionRecord, ...]
    slots: tuple[SlotReport, ...] = ()
    started_unix_s: float
    wall_s: float
