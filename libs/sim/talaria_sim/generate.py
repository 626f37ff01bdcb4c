"""Generated workloads: `gen:SOURCE?key=value&...`, seeded and deterministic. Pure.

The statistics are those of recorded agent runs (figures for the performance model): medians and
95th percentiles, between which quantiles are interpolated on a logarithmic scale.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Annotated, Final, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from talaria_sim.workload import CallPlan, SessionPlan, Workload, WorkloadError, near

PREFIX: Final = "gen:"
_Z95: Final = 1.645
_Z99: Final = 2.326


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one kind of agent."""

    text: str
    calls: tuple[float, float]
    """Calls of a session, p50 and p95."""
    first_prompt_tokens: int
    last_prompt_tokens: int
    """Median of the last prompts."""
    shared_opening_tokens: int
    """System prompt and tools, equal for all sessions."""
    growth_tokens: int
    """Median growth of the prompt from call to call."""
    output_tokens: tuple[float, float]
    gaps_s: tuple[float, float, float]
    """p50, p95, p99."""

    @property
    def growth_sigma(self) -> float:
        """Spread of a log-normal growth whose median and mean (first to last prompt) are known."""
        mean = (self.last_prompt_tokens - self.first_prompt_tokens) / self.calls[0]
        return math.sqrt(max(0.0, 2 * math.log(mean / self.growth_tokens)))


SOURCES: Final = {
    "swe": Source(
        text="SWE-bench Lite, mini-swe-agent",
        calls=(76, 133),
        first_prompt_tokens=1_700,
        last_prompt_tokens=34_000,
        shared_opening_tokens=320,
        growth_tokens=315,
        output_tokens=(90, 823),
        gaps_s=(0.26, 0.94, 5.6),
    ),
    "rebench": Source(
        text="SWE-rebench, Claude Code",
        calls=(45, 112),
        first_prompt_tokens=13_400,
        last_prompt_tokens=54_000,
        shared_opening_tokens=12_000,
        growth_tokens=409,
        output_tokens=(155, 840),
        gaps_s=(0.04, 11.0, 20.0),
    ),
    "openhands": Source(
        text="SWE-bench Verified, OpenHands",
        calls=(45, 50),
        first_prompt_tokens=9_400,
        last_prompt_tokens=41_000,
        shared_opening_tokens=8_000,
        growth_tokens=428,
        output_tokens=(72, 471),
        gaps_s=(0.70, 1.75, 5.8),
    ),
    "longlived": Source(
        text="Claude Code, long-lived",
        calls=(36, 200),
        first_prompt_tokens=21_000,
        last_prompt_tokens=127_000,
        shared_opening_tokens=18_000,
        growth_tokens=657,
        output_tokens=(218, 1_510),
        gaps_s=(9.0, 160.0, 906.0),
    ),
}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a generated workload."""

    sessions: Annotated[int, Meta(ge=1, le=100_000)] = 12
    calls: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Calls of each session; with `depths=tailed` their median."""
    seed: int = 1
    models: Annotated[int, Meta(ge=1, le=1_000)] = 3
    """Labels m0, m1, ... that the sessions take in turn."""
    gap_max: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds at which tool gaps are cut."""
    depths: Literal["fixed", "tailed"] = "fixed"
    """`tailed`: session lengths spread as the source's do."""


def generate(spec: str, seed: int | None = None) -> Workload:
    """The workload that `gen:SOURCE?...` names; `seed` overrides the spec's."""
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    if name not in SOURCES:
        raise WorkloadError(f"{spec}: unknown source {near(name, tuple(SOURCES))}")
    options = _options(spec, query)
    if seed is not None:
        options = msgspec.structs.replace(options, seed=seed)
    source = SOURCES[name]
    sessions = tuple(_session(n, source, options) for n in range(options.sessions))
    note = f"generated from the statistics of {source.text}; texts are synthetic"
    return Workload(spec=spec, seed=options.seed, sessions=sessions, notes=(note,))


def _options(spec: str, query: str) -> Options:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise WorkloadError(f"{spec}: want key=value&key=value after '?'") from error
    values = dict(pairs)
    for key in values:
        if key not in Options.__struct_fields__:
            raise WorkloadError(f"{spec}: unknown key {near(key, Options.__struct_fields__)}")
    try:
        return msgspec.convert(values, Options, strict=False)
    except msgspec.ValidationError as error:
        raise WorkloadError(f"{spec}: {error}") from error


def _session(n: int, source: Source, options: Options) -> SessionPlan:
    rng = random.Random(f"{options.seed}/{n}")
    depth = options.calls
    if options.depths == "tailed":
        spread = source.calls[1] / source.calls[0]
        depth = max(1, round(_quantile(rng.random(), (options.calls, options.calls * spread))))
    calls: list[CallPlan] = []
    prompt_tokens = round(source.first_prompt_tokens * math.exp(rng.gauss(0.0, 0.1)))
    for k in range(depth):
        output_tokens = round(_quantile(rng.random(), source.output_tokens))
        gap_s = _quantile(rng.random(), source.gaps_s)
        growth = source.growth_tokens * math.exp(rng.gauss(0.0, source.growth_sigma))
        before = calls[-1] if calls else None
        if before is not None:
            # A prompt grows by the reply before it and by at least a line of tool result.
            prompt_tokens += max(round(growth), before.output_tokens + 16)
        calls.append(
            CallPlan(
                prompt_tokens=prompt_tokens,
                shared_tokens=before.prompt_tokens if before else source.shared_opening_tokens,
                output_tokens=max(1, output_tokens),
                gap_s=min(gap_s, options.gap_max) if before else 0.0,
                tool="bash" if k else "",
            )
        )
    return SessionPlan(
        id=f"s{n:03d}",
        label=f"m{n % options.models}",
        task=f"task-{n // options.models}",
        calls=tuple(calls),
    )


def _quantile(u: float, points: Sequence[float]) -> float:
    """The u-quantile through p50, p95 (and p99), log-linear in the normal score.

    Beyond the last point the last slope holds, cut at the 99.9th percentile.
    """
    z = min(NormalDist().inv_cdf(min(max(u, 1e-9), 1 - 1e-9)), 3.09)
    knots = list(zip((0.0, _Z95, _Z99), (math.log(p) for p in points), strict=False))
    (z0, y0), (z1, y1) = knots[0], knots[1]
    if z > z1 and len(knots) == 3:
        (z0, y0), (z1, y1) = knots[1], knots[2]
    return math.exp(y0 + (y1 - y0) * (z - z0) / (z1 - z0))
