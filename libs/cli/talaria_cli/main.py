"""The `talaria` command. IO.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from talaria_cli.commands import chat, demo, models, replay, serve, sessions, up, version
from talaria_cli.failure import CommandFailed, UsageError
from talaria_common.config import ConfigError
from talaria_common.errors import TalariaError
from talaria_sim.replay import ReplayFailed
from talaria_sim.workload import WorkloadError

COMMANDS: Final = (up, serve, models, chat, replay, demo, sessions, version)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where help is."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = _Parser(
        prog="talaria",
        description="Serving for tool-using LLM agents on a shared pool of GPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "first steps:\n"
            "  talaria up                      serve three small models on this machine\n"
            "  talaria chat                    talk to one of them (in another terminal)\n"
            "  talaria demo                    replay agent sessions under two policies, compare\n"
        ),
    )
    subparsers = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Two spinning OpenMP threads can collapse on two cores; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left (`talaria sessions | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, UsageError, WorkloadError) as error:
        return _complain(args.command, getattr(error, "detail", str(error)), 2)
    except (CommandFailed, ReplayFailed, TalariaError) as error:
        return _complain(args.command, getattr(error, "detail", str(error)), 1)
    except OSError as error:
        # A folder or file that cannot be used, a full disk: nothing that a traceback explains.
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _complain(args.command, what, 1)
    return code


def _complain(command: str, text: str, code: int) -> int:
    print(f"talaria {command}: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
