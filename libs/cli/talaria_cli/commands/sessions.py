"""`talaria sessions [ID]`: sessions of a running stack and where their time went. IO."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import quote

from talaria_cli import endpoint
from talaria_cli.output import print_json, table


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "sessions",
        help="sessions of a running stack and where their time went",
        description="Without ID: one row per session, latest first. With ID: its time, split.",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="one session")
    parser.add_argument("--url", default=endpoint.DEFAULT_URL, help="a running stack")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print sessions."""
    with endpoint.client(args.url) as http:
        if args.id:
            document = endpoint.get(http, f"/v1/sessions/{quote(args.id, safe='')}")
            print_json(document) if args.json else print(_one(document))
            return 0
        document = endpoint.get(http, "/v1/sessions")
    if args.json:
        print_json(document)
        return 0
    rows = [_row(session) for session in document.get("data", [])]
    head = ("session", "model", "state", "calls", "in flight", "instance", "SCT s", "cached")
    print(table(head, rows, left=3) if rows else "no sessions yet")
    return 0


def _row(session: dict[str, Any]) -> list[str]:
    return [
        str(session.get("id")),
        str(session.get("model") or "-"),
        str(session.get("state")),
        str(session.get("calls")),
        str(session.get("in_flight")),
        str(session.get("instance") or "-"),
        f"{float(session.get('sct_s') or 0.0):.2f}",
        _cached(session),
    ]


def _cached(session: dict[str, Any]) -> str:
    usage = session.get("usage") or {}
    prompt_tokens = usage.get("prompt_tokens") or 0
    return f"{(usage.get('cached_tokens') or 0) / prompt_tokens:.0%}" if prompt_tokens else "-"


def _one(session: dict[str, Any]) -> str:
    sct_s = float(session.get("sct_s") or 0.0)
    parts: dict[str, float] = session.get("parts") or {}
    lines = [
        f"{session.get('id')}: {session.get('state')}, {session.get('calls')} calls on "
        f"{session.get('model')}, last on {session.get('instance') or '-'}, SCT {sct_s:.2f} s"
    ]
    rows = [
        [name.removesuffix("_s").replace("_", " "), f"{value:.3f}", _share(value, sct_s)]
        for name, value in parts.items()
    ]
    return "\n".join([*lines, table(("part", "s", "share"), rows)]) if rows else lines[0]


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if whole > 0 else "-"
