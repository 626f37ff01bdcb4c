"""Workloads: what agent sessions ask for and when, whoever answers. Pure.

One form for recorded, normalised and generated sessions; docs/formats.md tells the sources. Sizes
are planned token counts; texts are made from them by `texts`, or come with a recorded session.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

BYTES_PER_TOKEN: Final = 4
"""Of a recorded reply without a token count."""
UNRECORDED_GAP_S: Final = 0.5
ESTIMATED: Final = (
    "{} recorded sessions have no token counts or times: output lengths are the recorded "
    f"replies' bytes / {BYTES_PER_TOKEN}, gaps {UNRECORDED_GAP_S:g} s"
)


class WorkloadError(ValueError):
    """A workload cannot be read or built; the text says where and what would do."""


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as planned."""

    output_tokens: int
    gap_s: float = 0.0
    """From the end of the session's previous answer to this call's arrival."""
    prompt_tokens: int = 0
    """Planned or recorded size; 0: not recorded."""
    shared_tokens: int = 0
    """Leading tokens shared with the previous prompt; of a first call: with the other sessions'."""
    tool: str = ""
    """Whose result preceded the call."""
    request_messages: int = 0
    """Of a recorded session: how many of its messages this call sends."""


class SessionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One agent run as planned."""

    id: str
    label: str
    """The workload's own name for the model."""
    task: str = ""
    """Sessions of one task share their opening's text."""
    calls: tuple[CallPlan, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    """Recorded messages; empty: to be synthesised."""
    tools: tuple[Mapping[str, Any], ...] = ()
    is_estimated: bool = False
    """Recorded without token counts or times: lengths and gaps are estimates."""

    def extends(self, index: int) -> bool:
        """Whether call `index` keeps the whole prompt of the call before it."""
        if self.messages or index == 0:
            return index > 0
        return self.calls[index].shared_tokens >= self.calls[index - 1].prompt_tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions to replay."""

    spec: str
    seed: int
    sessions: tuple[SessionPlan, ...]
    notes: tuple[str, ...] = ()
    """What a reader of the results must know about it."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what is estimated."""
        estimated = sum(session.is_estimated for session in self.sessions)
        return self.notes + ((ESTIMATED.format(estimated),) if estimated else ())

    @property
    def calls(self) -> int:
        return sum(len(session.calls) for session in self.sessions)

    @property
    def labels(self) -> tuple[str, ...]:
        """Model labels in sorted order."""
        return tuple(sorted({session.label for session in self.sessions}))

    def limited(self, sessions: int | None = None, calls: int | None = None) -> Workload:
        """The first `sessions` sessions, each cut to its first `calls` calls."""
        kept = self.sessions[:sessions]
        return msgspec.structs.replace(
            self,
            sessions=tuple(msgspec.structs.replace(s, calls=s.calls[:calls]) for s in kept),
        )

    def scaled(
        self, *, tokens: float = 1.0, gaps: float = 1.0, gap_max_s: float | None = None
    ) -> Workload:
        """Token counts and gaps multiplied, gaps cut at `gap_max_s` afterwards.

        Prompts of recorded sessions stay as they are: only their output lengths shrink.
        """
        if tokens <= 0 or gaps < 0 or (gap_max_s is not None and gap_max_s < 0):
            raise WorkloadError(
                "--token-scale must be above 0, --gap-scale and --gap-max not below"
            )
        notes = self.notes
        if tokens != 1.0 and any(s.messages for s in self.sessions):
            notes += ("the token scale cuts output lengths only: recorded prompts stay whole",)
        return msgspec.structs.replace(
            self,
            notes=notes,
            sessions=tuple(
                msgspec.structs.replace(
                    s, calls=tuple(_scaled_call(c, tokens, gaps, gap_max_s) for c in s.calls)
                )
                for s in self.sessions
            ),
        )


def _scaled_call(call: CallPlan, tokens: float, gaps: float, gap_max_s: float | None) -> CallPlan:
    gap_s = call.gap_s * gaps
    return msgspec.structs.replace(
        call,
        output_tokens=max(1, round(call.output_tokens * tokens)),
        prompt_tokens=round(call.prompt_tokens * tokens),
        shared_tokens=round(call.shared_tokens * tokens),
        gap_s=gap_s if gap_max_s is None else min(gap_s, gap_max_s),
    )


def map_models(
    workload: Workload, served: Sequence[str], given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Served model id of each label: as given, else the label itself if it is served, else round-robin.

    Recorded message sessions without a mapping go to the first served model, which in the default
    catalogue is the one that has learnt to speak. Raises `WorkloadError` for unknown names.
    """
    if not served:
        raise WorkloadError("no model is served")
    given = given or {}
    for label, model in given.items():
        if label not in workload.labels:
            raise WorkloadError(
                f"--model-map: the workload has no model {near(label, workload.labels)}"
            )
        if model not in served:
            raise WorkloadError(f"--model-map: no such model is served: {near(model, served)}")
    recorded = {s.label for s in workload.sessions if s.messages}
    out: dict[str, str] = {}
    for n, label in enumerate(workload.labels):
        default = served[0] if label in recorded else served[n % len(served)]
        out[label] = given.get(label) or (label if label in served else default)
    return out


def near(name: str, known: Sequence[str]) -> str:
    """`name` with the nearest known name, for an error text."""
    match = difflib.get_close_matches(name, known, n=1)
    return (
        f"{name!r}; did you mean {match[0]!r}?"
        if match
        else f"{name!r} (known: {', '.join(known)})"
    )
