"""The replay report: one self-contained HTML page from a replay document. IO (reads its template)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any, Final

from talaria_sim import charts
from talaria_sim.metrics.summary import baseline, caveats, headline, speedup

NONE: Final = "n/a"

COLUMNS: Final = (
    ("sct_p50_s", "SCT p50 s", min),
    ("sct_p95_s", "SCT p95 s", min),
    ("ttft_p50_s", "TTFT p50 s", min),
    ("ttft_p95_s", "TTFT p95 s", min),
    ("tpot_p50_s", "TPOT p50 s", min),
    ("cached_share", "cached", max),
    ("calls_finished", "calls", None),
    ("rounds", "rounds", None),
    ("switches", "switches", None),
    ("switch_share", "switching", min),
    ("wall_s", "wall s", min),
)

PARTS: Final = (
    ("tool_gap", "tool gap", "--gap", ("tool_gap_s",)),
    ("queue", "queue", "--queue", ("queue_s",)),
    ("switch", "switch", "--switch", ("switch_s",)),
    ("restore", "restore", "--restore", ("restore_s",)),
    ("prefill", "prefill", "--prefill", ("prefill_s",)),
    ("decode", "decode", "--decode", ("decode_s",)),
    (
        "other",
        "gateway, placing, transfer",
        "--other",
        ("gateway_s", "place_s", "admit_s", "transfer_s", "deliver_s"),
    ),
    ("lost", "unattributed", "--lost", ("unattributed_s",)),
)


def render(document: Mapping[str, Any]) -> str:
    """The page for a replay document (docs/formats.md)."""
    policies: dict[str, Any] = dict(document["policies"])
    template = resources.files("talaria_sim").joinpath("templates/report.html").read_text("utf-8")
    models = sorted({row["model"] for entry in policies.values() for row in entry["sessions"]})
    legend_models = [(f"var(--m{n % 8})", model) for n, model in enumerate(models)]
    return Template(template).substitute(
        title=escape(headline(dict(document))),
        headline=escape(headline(dict(document))),
        lead=escape(_lead(document)),
        caveats=_caveats(document),
        table=_table(policies),
        policy_legend=_legend([(f"var(--s{n % 8})", name) for n, name in enumerate(policies)]),
        cdf=charts.cdf(
            {
                name: [row["sct_s"] for row in entry["sessions"] if row["sct_s"] is not None]
                for name, entry in policies.items()
            }
        ),
        part_legend=_legend([(f"var({colour})", text) for _, text, colour, _ in PARTS]),
        bars=charts.stacked_bars({name: _mean_parts(entry) for name, entry in policies.items()}),
        model_legend=_legend(
            [*legend_models, ("var(--switch)", "switch"), ("var(--ink)", "session-prefill")]
        ),
        timelines=_timelines(policies, models),
        sessions=_sessions(policies),
        conditions=_conditions(document),
        series="\n".join(
            f"svg .s{n} {{ stroke: var(--s{n}); }} svg .m{n} {{ fill: var(--m{n}); }}"
            for n in range(8)
        ),
        parts="\n".join(f"svg .p-{key} {{ fill: var({colour}); }}" for key, _, colour, _ in PARTS),
    )


def _lead(document: Mapping[str, Any]) -> str:
    first = next(iter(document["policies"].values()))
    sessions, calls = len(first["sessions"]), first["calls_planned"]
    base = baseline(list(document["policies"]))
    compared = ", once under each policy on a fresh stack" if base else ""
    return (
        f"{sessions} agent sessions with {calls} model calls over {_count_models(first)}, replayed "
        f"with their tool gaps on the {document['engine']} engine{compared}. An agent is judged by "
        "when its whole session is done, not by any one answer."
    )


def _count_models(entry: Mapping[str, Any]) -> str:
    models = len({row["model"] for row in entry["sessions"]})
    return "one model" if models == 1 else f"{models} models"


def _caveats(document: Mapping[str, Any]) -> str:
    found = caveats(dict(document))
    if not found:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<section class="warn"><h2>Read this first</h2><ul>{items}</ul></section>'


def _table(policies: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{title.replace(' s', '&nbsp;s')}</th>" for _, title, _ in COLUMNS)
    rows: list[str] = []
    for n, (name, entry) in enumerate(policies.items()):
        cells = [f"<td>{_dot(f'var(--s{n % 8})')}{escape(name)}</td>"]
        for key, _, best in COLUMNS:
            values = [e[key] for e in policies.values() if e[key] is not None]
            is_best = best is not None and len(set(values)) > 1 and entry[key] == best(values)
            kind = ' class="best"' if is_best else ""
            cells.append(f"<td{kind}>{figure(key, entry[key])}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr><th>policy</th>{head}</tr>{''.join(rows)}</table>"


def figure(key: str, value: float | int | None) -> str:
    """A figure as text: shares in percent, seconds to three digits or so."""
    if value is None:
        return NONE
    if key.endswith("_share"):
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _mean_parts(entry: Mapping[str, Any]) -> dict[str, float]:
    sessions = max(1, len(entry["sessions"]))
    parts = entry["parts_s"]
    return {
        key: max(0.0, sum(parts[name] for name in names)) / sessions for key, _, _, names in PARTS
    }


def _timelines(policies: Mapping[str, Any], models: Sequence[str]) -> str:
    top_s = max(entry["wall_s"] for entry in policies.values())
    out: list[str] = []
    for name, entry in policies.items():
        switching = figure("switch_share", entry["switch_share"])
        out.append(
            f"<h3>{escape(name)}: {entry['rounds']} rounds, {entry['switches']} switches, "
            f"{switching} of the time switching, {entry['sp_admitted']} calls let in by "
            "session-prefill</h3>"
        )
        if entry["slots"]:
            out.append(charts.timeline(entry["slots"], models, top_s, entry["wall_s"]))
        else:
            out.append("<p>No slots were heard: the stack's bus was not reachable.</p>")
    return "".join(out)


def _sessions(policies: Mapping[str, Any]) -> str:
    names = list(policies)
    base = baseline(names)
    head = "".join(f"<th>{escape(name)} SCT s</th><th>cached</th>" for name in names)
    ratio_head = "<th>ratio</th>" if base else ""
    by_policy = {
        name: {row["id"]: row for row in entry["sessions"]} for name, entry in policies.items()
    }
    rows: list[str] = []
    for row in policies[names[0]]["sessions"]:
        cells = [
            f"<td>{escape(row['id'])}</td><td class='name'>{escape(row['model'])}</td>"
            f"<td>{row['calls']}/{row['planned_calls']}</td>"
        ]
        for name in names:
            other = by_policy[name].get(row["id"], {"sct_s": None, "cached_share": None})
            cells.append(f"<td>{figure('sct_s', other['sct_s'])}</td>")
            cells.append(f"<td>{figure('cached_share', other['cached_share'])}</td>")
        if base:
            ours, theirs = row["sct_s"], by_policy[base].get(row["id"], {}).get("sct_s")
            cells.append(f"<td>{f'{theirs / ours:.2f}x' if ours and theirs else NONE}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        "<table><tr><th>session</th><th class='name'>model</th><th>calls</th>"
        f"{head}{ratio_head}</tr>{''.join(rows)}</table>"
    )


def _conditions(document: Mapping[str, Any]) -> str:
    host = ", ".join(f"{key} {value}" for key, value in document["host"].items())
    items = [
        ("workload", str(document["workload"])),
        ("seed", str(document["seed"])),
        ("engine", str(document["engine"])),
        ("host", host),
        ("arrivals", "closed loop, all sessions start at once, tool gaps as planned"),
        ("lengths", "output lengths forced to the planned ones, the same under every policy"),
    ]
    items += [(key, str(value)) for key, value in document.get("conditions", {}).items()]
    items += [("note", note) for note in document.get("notes", ())]
    base = baseline(list(document["policies"]))
    if base:
        first = next(iter(document["policies"]))
        ratios = (
            (title, speedup(dict(document), first, base, key))
            for key, title in (("sct_p50_s", "median"), ("sct_p95_s", "95th percentile"))
        )
        text = ", ".join(f"{title} {ratio:.2f}x" for title, ratio in ratios if ratio)
        items.append((f"SCT, {base} / {first}", text or NONE))
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items)
    return f"<dl>{rows}</dl>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<span>{_dot(colour)}{escape(text)}</span>" for colour, text in entries)


def _dot(colour: str) -> str:
    return f'<span class="dot" style="background:{colour}"></span>'
