"""Figures of one replay: SCT, TTFT, TPOT, slots, and where the time went. Pure.

Percentiles are by nearest rank. Everything a client can measure is the client's measurement; the
parts of a session's time are the stack's own account (its session documents).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from talaria_common.wire import SessionParts, SlotReport
from talaria_sim.records import CallRecord, RunRecord, SessionRecord

PARTS: Final = SessionParts.__struct_fields__


def percentile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank q-quantile, 0 < q <= 1; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def summarise(run: RunRecord) -> dict[str, Any]:
    """The policy's entry in the replay document (docs/formats.md)."""
    scts = [s.sct_s for s in run.sessions if s.sct_s is not None]
    finished = [call for s in run.sessions for call in s.finished]
    ttfts = [ttft_s(call) for call in finished]
    tpots = [value for call in finished if (value := tpot_s(call)) is not None]
    continuations = [c for c in finished if c.covers_before is not None]
    prompt_tokens = sum(c.prompt_tokens for c in finished)
    accounted = [s for s in run.sessions if s.document is not None]
    parts = _parts(accounted)
    account_s = sum(float((s.document or {}).get("sct_s") or 0.0) for s in accounted)
    return {
        "sct_p50_s": _rounded(percentile(scts, 0.50)),
        "sct_p95_s": _rounded(percentile(scts, 0.95)),
        "sct_p99_s": _rounded(percentile(scts, 0.99)),
        "sct_mean_s": _rounded(sum(scts) / len(scts) if scts else None),
        "ttft_p50_s": _rounded(percentile(ttfts, 0.50)),
        "ttft_p95_s": _rounded(percentile(ttfts, 0.95)),
        "tpot_p50_s": _rounded(percentile(tpots, 0.50)),
        "sessions_finished": len(scts),
        "calls_planned": sum(s.planned_calls for s in run.sessions),
        "calls_finished": len(finished),
        "calls_failed": sum(c.outcome == "failed" for s in run.sessions for c in s.calls),
        "prompt_tokens": prompt_tokens,
        "planned_prompt_tokens": sum(c.planned_prompt_tokens for c in finished),
        "output_tokens": sum(c.output_tokens for c in finished),
        "cached_share": _share(sum(c.cached_tokens for c in finished), prompt_tokens),
        "continuations": len(continuations),
        "continuations_covered": sum(bool(c.covers_before) for c in continuations),
        **_slot_figures(run.slots),
        "shed": sum(c.times_shed > 0 for s in run.sessions for c in s.calls),
        "cut_by_context": sum(c.outcome == "cut_by_context" for s in run.sessions for c in s.calls),
        "unattributed_share": _share(abs(parts["unattributed_s"]), account_s),
        "wall_s": round(run.wall_s, 3),
        "parts_s": {name: round(value, 3) for name, value in parts.items()},
        "errors": sorted({c.error for s in run.sessions for c in s.calls if c.outcome == "failed"})[
            :10
        ],
        "sessions": [_session_row(s) for s in run.sessions],
        "slots": [_slot_row(slot, run.started_unix_s) for slot in run.slots],
    }


def ttft_s(call: CallRecord) -> float:
    """Intended arrival to first token."""
    first_s = call.ended_s if call.first_token_s is None else call.first_token_s
    return first_s - call.intended_s


def tpot_s(call: CallRecord) -> float | None:
    """Mean seconds per output token after the first; None of a single token."""
    if call.first_token_s is None or call.output_tokens < 2:
        return None
    return (call.ended_s - call.first_token_s) / (call.output_tokens - 1)


def speedup(document: dict[str, Any], policy: str, baseline: str, key: str = "sct_p50_s") -> Any:
    """How many times sooner `policy` is than `baseline`; None if either has no figure."""
    ours, theirs = (document["policies"].get(name, {}).get(key) for name in (policy, baseline))
    return theirs / ours if ours and theirs else None


def headline(document: dict[str, Any]) -> str:
    """One sentence: the first policy against the baseline."""
    names = list(document["policies"])
    base = baseline(names)
    if base is None:
        only = document["policies"][names[0]]["sct_p50_s"]
        if only is None:
            return f"No session finished under {names[0]}."
        return f"Under {names[0]} the median session completes in {only:.1f} s."
    ratio = speedup(document, names[0], base)
    if ratio is None:
        return f"No ratio: {names[0]} or {base} finished no session."
    if ratio >= 1.02:
        return f"{names[0]} finishes the median session {ratio:.1f}x sooner than {base}."
    if ratio <= 0.98:
        return f"{names[0]} takes {1 / ratio:.1f}x as long for the median session as {base}."
    return f"{names[0]} and {base} finish the median session equally soon ({ratio:.2f}x)."


def baseline(names: Sequence[str]) -> str | None:
    """What the first policy is compared with: a round-only one if there is one, else the last."""
    others = names[1:]
    weakest = [name for name in others if name.split("+")[0] == "round-only"]
    chosen = weakest or others
    return chosen[-1] if chosen else None


def caveats(document: dict[str, Any]) -> list[str]:
    """What makes the comparison void or narrower than it looks."""
    out: list[str] = []
    for name, entry in document["policies"].items():
        if entry["calls_failed"]:
            out.append(f"{name}: {entry['calls_failed']} calls failed, the comparison is void")
        if entry["shed"]:
            out.append(f"{name}: {entry['shed']} calls were shed, the comparison is void")
        if entry["cut_by_context"]:
            out.append(
                f"{name}: {entry['cut_by_context']} sessions stopped where their prompt "
                "no longer fits the model's context"
            )
    return out


def _parts(accounted: Iterable[SessionRecord]) -> dict[str, float]:
    totals = dict.fromkeys(PARTS, 0.0)
    for session in accounted:
        parts = (session.document or {}).get("parts") or {}
        for name in PARTS:
            totals[name] += float(parts.get(name) or 0.0)
    return totals


def _slot_figures(slots: Sequence[SlotReport]) -> dict[str, Any]:
    switch_s = sum(slot.switch_s for slot in slots)
    wall_s = sum(slot.switch_s + slot.active_s + slot.idle_s for slot in slots)
    return {
        "rounds": len({(slot.instance, slot.round_n) for slot in slots}),
        "slots_closed": len(slots),
        "switches": sum(slot.switch_s > 0 for slot in slots),
        "switch_share": _share(switch_s, wall_s),
        "sp_admitted": sum(slot.sp_admitted for slot in slots),
        "sp_parked": sum(slot.sp_parked for slot in slots),
    }


def _session_row(session: SessionRecord) -> dict[str, Any]:
    finished = session.finished
    parts = (session.document or {}).get("parts") or {}
    prompt_tokens = sum(c.prompt_tokens for c in finished)
    return {
        "id": session.id,
        "model": session.model,
        "sct_s": _rounded(session.sct_s),
        "calls": len(finished),
        "planned_calls": session.planned_calls,
        "ttft_p50_s": _rounded(percentile([ttft_s(c) for c in finished], 0.5)),
        "cached_share": _share(sum(c.cached_tokens for c in finished), prompt_tokens),
        "outcome": session.calls[-1].outcome if session.calls else "failed",
        "parts_s": {name: round(float(parts.get(name) or 0.0), 4) for name in PARTS},
    }


def _slot_row(slot: SlotReport, started_unix_s: float) -> dict[str, Any]:
    return {
        "instance": slot.instance,
        "model": slot.model,
        "round": slot.round_n,
        "opened_s": round(slot.opened_unix_s - started_unix_s, 3),
        "switch_s": round(slot.switch_s, 4),
        "active_s": round(slot.active_s, 4),
        "idle_s": round(slot.idle_s, 4),
        "phases": [[name, round(seconds, 4)] for name, seconds in slot.phases],
        "sp_admitted": slot.sp_admitted,
        "closed_because": slot.closed_because,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0
