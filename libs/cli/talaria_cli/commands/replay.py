"""`talaria replay WORKLOAD`: agent sessions under several policies, SCT side by side. IO."""

from __future__ import annotations

import argparse
from typing import Any, Final

from talaria_cli import lifetime, replays
from talaria_cli.failure import UsageError
from talaria_common.policies import POLICY_SETS, policy_set
from talaria_sim.traces import load

DEFAULT_POLICIES: Final = ("talaria", "round-only")


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay agent sessions under several policies and compare",
        description="Replay recorded or generated agent sessions, closed loop with their tool "
        "gaps, and print session completion times side by side. Each policy gets a fresh stack; "
        "with --url, the running stack is measured as it is.",
        epilog="WORKLOAD: a .jsonl[.gz] of calls, a folder (or file) of recorded messages, or "
        "gen:SOURCE?key=value&... with SOURCE swe, rebench, openhands or longlived and the keys "
        "sessions, calls, seed, models, gap_max, depths; docs/formats.md tells them all.",
    )
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument(
        "--policy",
        action="append",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(POLICY_SETS)}, or NAME+switch=value "
        f"(default: {' '.join(DEFAULT_POLICIES)})",
    )
    parser.add_argument("--sessions", type=int, metavar="N", help="only the first N sessions")
    parser.add_argument("--calls", type=int, metavar="N", help="only the first N calls of each")
    parser.add_argument(
        "--token-scale", type=float, default=1.0, metavar="F", help="times all sizes"
    )
    parser.add_argument(
        "--gap-scale", type=float, default=1.0, metavar="F", help="times all tool gaps"
    )
    parser.add_argument("--gap-max", type=float, metavar="S", help="cut tool gaps at S seconds")
    parser.add_argument(
        "--model-map", metavar="LABEL=ID,..", default="", help="workload's models to served ones"
    )
    parser.add_argument("--seed", type=int, help="seed of what is generated")
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="instances per stack")
    parser.add_argument("--config", metavar="FILE", help="settings of the fresh stacks")
    parser.add_argument("--url", help="replay against this running stack instead")
    parser.add_argument("--nats-url", metavar="URL", help="bus of that stack, to hear its slots")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--html", metavar="FILE", help="write a report to read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, print the table, write the files; 1 if any call failed."""
    plan = _plan(args)
    document = lifetime.run_interruptible(lambda: replays.run(plan))
    replays.print_results(document)
    replays.write(document, args.json, args.html)
    for path in filter(None, (args.json, args.html)):
        print(f"written: {path}")
    return replays.exit_code(document)


def _plan(args: argparse.Namespace) -> replays.Plan:
    policies = tuple(name for group in args.policy or [] for name in group)
    if args.url and policies:
        raise UsageError("--policy needs fresh stacks: leave --url out, or --policy")
    if args.nats_url and not args.url:
        raise UsageError("--nats-url goes with --url")
    for name in ("sessions", "calls", "instances"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1")
    for name in policies:
        try:
            policy_set(name)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if len(set(policies)) < len(policies):
        raise UsageError("--policy names a policy twice")
    workload = load(args.workload, args.seed).limited(args.sessions, args.calls)
    workload = workload.scaled(tokens=args.token_scale, gaps=args.gap_scale, gap_max_s=args.gap_max)
    return replays.Plan(
        workload=workload,
        policies=policies or DEFAULT_POLICIES,
        model_map=parse_map(args.model_map),
        engine="as served" if args.url else args.engine,
        instances=args.instances,
        stack_arguments=("--config", args.config) if args.config else (),
        url=args.url,
        nats_url=args.nats_url,
        conditions=_conditions(args),
    )


def parse_map(text: str) -> dict[str, str]:
    """`m0=ID,m1=ID` as a dict. Raises `UsageError`."""
    out: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        label, equals, model = pair.partition("=")
        if not equals or not label or not model:
            raise UsageError(f"--model-map: want LABEL=ID,LABEL=ID, not {pair!r}")
        out[label] = model
    return out


def _conditions(args: argparse.Namespace) -> dict[str, str]:
    shown = {
        "sessions": args.sessions,
        "calls": args.calls,
        "token scale": None if args.token_scale == 1.0 else args.token_scale,
        "gap scale": None if args.gap_scale == 1.0 else args.gap_scale,
        "gaps at most": None if args.gap_max is None else f"{args.gap_max:g} s",
        "instances": args.instances,
        "model map": args.model_map or None,
    }
    return {key: str(value) for key, value in shown.items() if value is not None}
