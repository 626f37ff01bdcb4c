"""`talaria demo`: what `make run` shows: real inference, two policies, a report. IO."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

from talaria_cli import deployment as deployments
from talaria_cli import lifetime, replays
from talaria_cli.output import duration, say
from talaria_sim.metrics.summary import baseline, speedup
from talaria_sim.traces import load

# Of the first twelve seeds the one with the least work, so that it takes about two minutes.
WORKLOAD: Final = "gen:swe?sessions=6&calls=6&seed=6"
TOKEN_SCALE: Final = {"torch": 0.25, "fake": 0.4}
GAP_MAX_S: Final = 1.0
T_TTFT_S: Final = 3.0
"""The round's target on a CPU."""
POLICIES: Final = ("talaria", "round-only")
BUDGET_S: Final = 130.0
"""For one policy: both together, with two starts, stay under five minutes."""


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "demo",
        help="replay generated agents under two policies, write a report",
        description="Prepare the catalogue, then replay generated agent sessions over three small "
        "models with real inference under `talaria` and under the baseline `round-only`. About two "
        "minutes on two cores.",
    )
    parser.add_argument(
        "--engine", choices=("torch", "fake"), default="torch", help="fake: a quick look, no models"
    )
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the report")
    parser.add_argument("--seed", type=int, help="of the generated workload")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and tell what came of it; 1 if any call failed."""
    start_s = time.monotonic()
    if args.engine == "torch":
        _prepare()
    scale = TOKEN_SCALE[args.engine]
    workload = load(WORKLOAD, args.seed).scaled(tokens=scale, gap_max_s=GAP_MAX_S)
    say(
        f"replaying {len(workload.sessions)} agent sessions, {workload.calls} model calls, over "
        f"three models that take turns on one instance, under {' and '.join(POLICIES)}"
        + (": about two minutes" if args.engine == "torch" else "")
    )
    plan = replays.Plan(
        workload=workload,
        policies=POLICIES,
        engine=args.engine,
        stack_env={"TALARIA_INSTANCE__T_TTFT_S": f"{T_TTFT_S:g}"},
        budget_s=BUDGET_S if args.engine == "torch" else None,
        conditions={
            "token scale": f"{scale:g}",
            "gaps at most": f"{GAP_MAX_S:g} s",
            "T_TTFT": f"{T_TTFT_S:g} s",
            "instances": "1",
        },
    )
    document = lifetime.run_interruptible(lambda: replays.run(plan))
    folder = Path(args.out)
    report, figures = folder / "report.html", folder / "report.json"
    replays.write(document, str(figures), str(report))
    print()
    replays.print_results(document)
    print()
    _explain(document, report, figures, time.monotonic() - start_s)
    return replays.exit_code(document)


def _prepare() -> None:
    arguments = argparse.Namespace(
        **dict.fromkeys(("config", "data", "models", "policy", "nats_url", "otlp", "record")),
        engine="torch",
    )
    deployments.prepare(deployments.resolve(arguments), say)


def _explain(document: dict[str, Any], report: Path, figures: Path, seconds: float) -> None:
    base = baseline(POLICIES)
    ratio = speedup(document, POLICIES[0], base) if base else None
    print(f"report: {report.resolve()}")
    print(f"figures: {figures.resolve()}   (all done in {duration(seconds)})")
    print()
    if ratio:
        print(
            f"What {ratio:.1f}x means: the time after which half of the sessions are done under "
            f"{base}, over the same\nunder {POLICIES[0]}, which keeps a session's KV while other "
            "models run and lets a returning session in\nbefore its model's slot closes."
        )
        print()
    print("next steps:")
    print("  talaria up                     serve the models; then curl, the openai SDK, or:")
    print("  talaria chat                   talk to one of them")
    print("  talaria replay --help          other workloads and policies")
