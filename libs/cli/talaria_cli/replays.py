"""Replaying one workload under several policies, each on a stack of its own. IO.

`talaria replay` and `talaria demo` share this: what to run is a `Plan`, the result is the replay
document of docs/formats.md.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from talaria_cli import host
from talaria_cli.failure import CommandFailed
from talaria_cli.fresh_stack import FreshStack
from talaria_cli.output import ProgressLine, duration, say, table
from talaria_common.nats_bus import NatsBus
from talaria_sim.fit import Speed, fitted
from talaria_sim.metrics.summary import baseline, caveats, headline, summarise
from talaria_sim.records import RunRecord
from talaria_sim.replay import Progress, replay, served_models, warm_up
from talaria_sim.report import COLUMNS, figure, render
from talaria_sim.slots import SlotCollector
from talaria_sim.workload import Workload, map_models

GIVEN_STACK: Final = "as-served"
"""Name of the one entry when a running stack is replayed against."""


@dataclass(frozen=True)
class Plan:
    """What to replay, where."""

    workload: Workload
    policies: tuple[str, ...]
    model_map: Mapping[str, str] = field(default_factory=dict)
    engine: str = "torch"
    instances: int = 1
    stack_arguments: tuple[str, ...] = ()
    stack_env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    nats_url: str | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)
    budget_s: float | None = None
    """Seconds that one policy may take; sessions are cut to fewer calls to keep it."""


async def run(plan: Plan) -> dict[str, Any]:
    """The replay document; policies run one after the other."""
    runs = _Runs(plan)
    policies: dict[str, Any] = {}
    if plan.url is not None:
        record = await runs.on(GIVEN_STACK, plan.url, plan.nats_url, f"r{uuid.uuid4().hex[:8]}-")
        policies[GIVEN_STACK] = summarise(record)
    else:
        for name in plan.policies:
            policies[name] = summarise(await runs.on_fresh_stack(name))
    return {
        "workload": plan.workload.spec,
        "seed": plan.workload.seed,
        "host": host.describe(),
        "engine": plan.engine,
        "policies": policies,
        "conditions": dict(plan.conditions),
        "notes": [*plan.workload.remarks, *runs.notes],
    }


class _Runs:
    """The runs of one plan: the same workload each time, cut to the budget before the first."""

    def __init__(self, plan: Plan) -> None:
        self.notes: list[str] = []
        self._plan = plan
        self._workload = plan.workload
        self._is_fitted = plan.budget_s is None

    async def on_fresh_stack(self, policy: str) -> RunRecord:
        plan, line = self._plan, ProgressLine()
        arguments = ["--policy", policy, "--engine", plan.engine]
        arguments += ["--instances", str(plan.instances), *plan.stack_arguments]

        def waiting(seconds: float) -> None:
            line.show(f"{policy}: starting a fresh stack ... {duration(seconds)}")

        async with FreshStack(arguments, {**os.environ, **plan.stack_env}, waiting) as stack:
            line.clear()
            return await self.on(policy, stack.url, stack.nats_url, "")

    async def on(self, policy: str, url: str, nats_url: str | None, id_prefix: str) -> RunRecord:
        served = await served_models(url)
        models = map_models(self._workload, served, self._plan.model_map)
        line = ProgressLine()
        line.show(f"{policy}: warming up {', '.join(sorted(set(models.values())))}", now=True)
        speeds = await warm_up(url, sorted(set(models.values())))
        self._fit(models, speeds)
        workload = self._workload
        progress = Progress(
            len(workload.sessions),
            workload.calls,
            changed=lambda p: line.show(f"{policy}: {_progress_text(p)}"),
        )
        async with contextlib.AsyncExitStack() as cleanup:
            bus = None
            if nats_url:
                bus = await NatsBus.connect(nats_url, name="talaria-replay")
                cleanup.push_async_callback(bus.close)
            collector = await cleanup.enter_async_context(SlotCollector(bus))
            record = await replay(workload, models, url, id_prefix=id_prefix, progress=progress)
            line.clear()
            say(f"{policy}: {_progress_text(progress)}")
            await collector.settle()
        return msgspec.structs.replace(record, slots=collector.slots)

    def _fit(self, models: Mapping[str, str], speeds: Mapping[str, Speed]) -> None:
        """Cut the workload once to what this machine can do in the budget."""
        if self._is_fitted or self._plan.budget_s is None:
            return
        self._is_fitted = True
        whole = self._workload
        self._workload = fitted(whole, models, speeds, self._plan.budget_s)
        if self._workload.calls < whole.calls:
            text = f"cut from {whole.calls} to {self._workload.calls} calls: this machine is slow"
            self.notes.append(text)
            say(text)


def _progress_text(progress: Progress) -> str:
    text = (
        f"{progress.sessions_done}/{progress.sessions} sessions, "
        f"{progress.calls_done}/{progress.calls} calls, {duration(progress.elapsed_s)}"
    )
    if progress.calls_failed:
        text += f", {progress.calls_failed} FAILED"
    left_s = progress.remaining_s
    if left_s and progress.sessions_done < progress.sessions:
        text += f", about {duration(left_s)} left"
    return text


def print_results(document: Mapping[str, Any]) -> None:
    """The table and the ratio, on stdout."""
    policies: Mapping[str, Any] = document["policies"]
    head = ["policy", *(title for _, title, _ in COLUMNS)]
    rows = [
        [name, *(figure(key, entry[key]) for key, _, _ in COLUMNS)]
        for name, entry in policies.items()
    ]
    print(table(head, rows))
    print()
    print(headline(dict(document)))
    for text in caveats(dict(document)):
        print(f"note: {text}")
    for name, entry in policies.items():
        for text in entry["errors"]:
            print(f"{name}: failed: {text}")
    for text in document["notes"]:
        print(f"note: {text}")
    if baseline(list(policies)):
        print("note: closed loop, all sessions start at once; the same bodies under every policy")


def write(document: Mapping[str, Any], json_path: str | None, html_path: str | None) -> None:
    """Write what was asked for. Raises `CommandFailed`."""
    _write(json_path, lambda: msgspec.json.format(msgspec.json.encode(document), indent=2))
    _write(html_path, lambda: render(document).encode())


def _write(path: str | None, make: Callable[[], bytes]) -> None:
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(make())
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror or error}") from error


def exit_code(document: Mapping[str, Any]) -> int:
    """1 if any call failed."""
    return int(any(entry["calls_failed"] for entry in document["policies"].values()))
