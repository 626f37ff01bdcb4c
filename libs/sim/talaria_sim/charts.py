"""Inline SVG charts for the report: a CDF, stacked bars, a timeline of slots. Pure.

Colours are CSS classes, so that one drawing serves the light and the dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

WIDTH: Final = 860
_LEFT: Final = 120
_RIGHT: Final = 16


def ticks(top: float, about: int = 6) -> list[float]:
    """Round positions from 0 to `top`, some `about` of them."""
    if top <= 0:
        return [0.0]
    raw = top / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
    return [n * step for n in range(int(top / step + 1e-9) + 1)]


def cdf(series: Mapping[str, Sequence[float]], unit: str = "s") -> str:
    """Share of sessions done within x, one step line per name."""
    top = max((max(values) for values in series.values() if values), default=1.0) * 1.04
    height, bottom, left = 300, 260, 48
    scale = (WIDTH - left - _RIGHT) / top
    parts = [_open(height, "Cumulative distribution of session completion time")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * 240
        parts.append(_line(left, y, WIDTH - _RIGHT, y, "grid"))
        parts.append(_text(left - 8, y + 4, f"{share:.0%}", "tick end"))
    for x_s in ticks(top):
        x = left + x_s * scale
        parts.append(_line(x, bottom, x, bottom + 5, "axis"))
        parts.append(_text(x, bottom + 20, f"{x_s:g}", "tick mid"))
    parts.append(_text(WIDTH - _RIGHT, bottom + 36, f"session completion time, {unit}", "tick end"))
    for n, (name, values) in enumerate(series.items()):
        ordered = sorted(values)
        points: list[tuple[float, float]] = [(left, bottom)]
        for k, value in enumerate(ordered, 1):
            x = left + value * scale
            points += [(x, points[-1][1]), (x, bottom - 240 * k / len(ordered))]
        if ordered:
            points.append((WIDTH - _RIGHT, points[-1][1]))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline class="series s{n % 8}" points="{path}"><title>{escape(name)}</title></polyline>'
        )
    return _close(parts)


def stacked_bars(rows: Mapping[str, Mapping[str, float]], unit: str = "s") -> str:
    """One horizontal bar per row, split by part; the classes are `p-<part>`."""
    top = max((sum(row.values()) for row in rows.values()), default=1.0) * 1.06 or 1.0
    scale = (WIDTH - _LEFT - 60) / top
    height = 46 * len(rows) + 44
    parts = [_open(height, "Where the time of a session went")]
    for x_s in ticks(top):
        x = _LEFT + x_s * scale
        parts.append(_line(x, 8, x, height - 38, "grid"))
        parts.append(_text(x, height - 20, f"{x_s:g}", "tick mid"))
    parts.append(_text(WIDTH - _RIGHT, height - 4, f"{unit} per session, mean", "tick end"))
    for n, (name, row) in enumerate(rows.items()):
        y, x, total = 12 + 46 * n, float(_LEFT), sum(row.values())
        parts.append(_text(_LEFT - 10, y + 20, name, "label end"))
        for part, value in row.items():
            width = value * scale
            if width > 0:
                tip = f"{name}: {part} {value:.2f} s ({value / total:.0%})"
                parts.append(_rect(x, y, width, 30, f"p-{part}", tip))
            x += width
        parts.append(_text(x + 6, y + 20, f"{total:.1f} s", "label"))
    return _close(parts)


def timeline(
    slots: Sequence[Mapping[str, Any]], models: Sequence[str], top_s: float, wall_s: float
) -> str:
    """One lane per instance: slots by model, switches in between, SP marked below its lane."""
    instances = sorted({str(slot["instance"]) for slot in slots})
    scale = (WIDTH - _LEFT - _RIGHT) / max(top_s, 1e-9)
    height = 52 * max(1, len(instances)) + 34
    parts = [_open(height, "Slots of each instance over time")]
    for x_s in ticks(top_s, 8):
        x = _LEFT + x_s * scale
        parts.append(_line(x, 4, x, height - 30, "grid"))
        parts.append(_text(x, height - 14, f"{x_s:g}", "tick mid"))
    for lane, instance in enumerate(instances):
        y = 10 + 52 * lane
        parts.append(_text(_LEFT - 10, y + 20, instance, "label end"))
        for slot in slots:
            if slot["instance"] == instance:
                parts += _slot(slot, models, y, scale, top_s)
    end = _LEFT + wall_s * scale
    parts.append(_line(end, 4, end, height - 30, "finish"))
    parts.append(_text(WIDTH - _RIGHT, height - 1, "seconds since the start", "tick end"))
    return _close(parts)


def _slot(
    slot: Mapping[str, Any], models: Sequence[str], y: float, scale: float, top_s: float
) -> list[str]:
    model, start_s = str(slot["model"]), float(slot["opened_s"])
    number = models.index(model) % 8 if model in models else 7
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slot["phases"])
    tip = f"{model}, slot of round {slot['round']}: {phases}; switch {slot['switch_s']:.3f} s"
    parts: list[str] = []

    def block(at_s: float, seconds: float, top: float, height: float, kind: str) -> None:
        begin, end = max(0.0, at_s), min(top_s, at_s + seconds)
        if end > begin:
            x = _LEFT + begin * scale
            parts.append(_rect(x, top, max(0.6, (end - begin) * scale), height, kind, tip))

    block(start_s, slot["switch_s"], y, 30, "switch")
    at_s = start_s + slot["switch_s"]
    busy_s = slot["active_s"] + slot["idle_s"]
    block(at_s, busy_s, y, 30, f"m{number}")
    for name, seconds in slot["phases"]:
        if name == "SP":
            block(at_s, seconds, y + 32, 5, "sp")
        elif name == "idle":
            block(at_s, seconds, y, 30, "idle")
        at_s += seconds
    return parts


def _open(height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'preserveAspectRatio="xMidYMid meet">'
    )


def _close(parts: list[str]) -> str:
    return "".join([*parts, "</svg>"])


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect class="{escape(kind)}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height:g}"><title>{escape(tip)}</title></rect>'
    )
