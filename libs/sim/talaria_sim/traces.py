"""Recorded workloads: normalised JSONL files and message files. IO (reads files)."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from talaria_sim.generate import PREFIX, generate
from talaria_sim.workload import (
    BYTES_PER_TOKEN,
    UNRECORDED_GAP_S,
    CallPlan,
    SessionPlan,
    Workload,
    WorkloadError,
)


class JsonlCall(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a normalised file."""

    session: Annotated[str, Meta(min_length=1, max_length=200)]
    turn: Annotated[int, Meta(ge=0)]
    model: str
    gap_before_s: float | None = None
    prompt_tokens: Annotated[int, Meta(ge=0)]
    cached_prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    provider_cached_tokens: int | None = None
    output_tokens: Annotated[int, Meta(ge=0)]
    tool: str | None = None
    task: str = ""


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a message file."""

    request_messages: Annotated[int, Meta(ge=1)]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    gap_before_s: float | None = None


class RecordedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A message file."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    messages: list[dict[str, Any]]
    calls: list[RecordedCall]


def load(spec: str, seed: int | None = None) -> Workload:
    """The workload that `spec` names: `gen:...`, a .jsonl[.gz] file, a message file or a folder.

    `seed` overrides that of a generated workload and seeds the texts of a normalised one.
    Raises `WorkloadError`.
    """
    if spec.startswith(PREFIX):
        return generate(spec, seed)
    path = Path(spec)
    try:
        if path.is_dir():
            files = sorted(path.glob("*.json"))
            if not files:
                raise WorkloadError(f"{spec}: no *.json message files in this folder")
            return _recorded(spec, files, seed or 0)
        if not path.is_file():
            raise WorkloadError(
                f"{spec}: no such file or folder (a generated one starts with 'gen:', "
                "for example 'gen:swe?sessions=12&calls=8&seed=1')"
            )
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            return _normalised(spec, path, seed or 0)
        if path.suffix == ".json":
            return _recorded(spec, [path], seed or 0)
    except (OSError, EOFError) as error:
        raise WorkloadError(f"{spec}: {error}") from error
    raise WorkloadError(
        f"{spec}: want a .jsonl, .jsonl.gz or .json file, or a folder of .json files"
    )


def _normalised(spec: str, path: Path, seed: int) -> Workload:
    by_session: dict[tuple[str, str], list[JsonlCall]] = {}
    for call in _lines(spec, path):
        by_session.setdefault((call.session, call.model), []).append(call)
    if not by_session:
        raise WorkloadError(f"{spec}: holds no call")
    for calls in by_session.values():
        calls.sort(key=lambda call: call.turn)
    # What a warm provider had cached of a typical first prompt is the opening that sessions share.
    openings = [calls[0].provider_cached_tokens or 0 for calls in by_session.values()]
    opening_tokens = median_low(openings) if len(openings) > 1 else 0
    names = [session for session, _ in by_session]
    return Workload(
        spec=spec,
        seed=seed,
        sessions=tuple(
            SessionPlan(
                id=session if names.count(session) == 1 else f"{session}@{model}",
                label=model,
                task=calls[0].task or session,
                calls=tuple(_plan(n, call, opening_tokens) for n, call in enumerate(calls)),
            )
            for (session, model), calls in by_session.items()
        ),
        notes=("sizes, order and gaps as recorded; texts are synthetic",),
    )


def _plan(n: int, call: JsonlCall, opening_tokens: int) -> CallPlan:
    return CallPlan(
        prompt_tokens=call.prompt_tokens,
        shared_tokens=call.cached_prefix_tokens if n else opening_tokens,
        output_tokens=max(1, call.output_tokens),
        gap_s=max(0.0, call.gap_before_s or 0.0) if n else 0.0,
        tool=call.tool or "",
    )


def _lines(spec: str, path: Path) -> Iterator[JsonlCall]:
    decoder = msgspec.json.Decoder(JsonlCall)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for n, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise WorkloadError(f"{spec}, line {n}: {error}") from error


def _recorded(spec: str, files: Iterable[Path], seed: int) -> Workload:
    sessions: list[SessionPlan] = []
    for file in files:
        try:
            recorded = msgspec.json.decode(file.read_bytes(), type=RecordedSession)
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{file}: {error}") from error
        calls = tuple(_recorded_call(file, n, recorded) for n in range(len(recorded.calls)))
        if not calls:
            raise WorkloadError(f"{file}: holds no call")
        sessions.append(
            SessionPlan(
                id=recorded.id,
                label=recorded.model or "recorded",
                task=recorded.id,
                calls=calls,
                messages=tuple(recorded.messages),
                tools=tuple(recorded.tools or ()),
                is_estimated=any(call.output_tokens is None for call in recorded.calls),
            )
        )
    notes = ("messages as recorded",)
    return Workload(spec=spec, seed=seed, sessions=tuple(sessions), notes=notes)


def _recorded_call(file: Path, n: int, recorded: RecordedSession) -> CallPlan:
    call = recorded.calls[n]
    if call.request_messages > len(recorded.messages):
        raise WorkloadError(f"{file}: call {n} sends more messages than the file has")
    output_tokens = call.output_tokens
    gap_s = call.gap_before_s
    if output_tokens is None:
        reply = recorded.messages[call.request_messages : call.request_messages + 1]
        output_tokens = len(msgspec.json.encode(_spoken(reply))) // BYTES_PER_TOKEN
        gap_s = UNRECORDED_GAP_S if gap_s is None else gap_s
    return CallPlan(
        prompt_tokens=call.prompt_tokens or 0,
        output_tokens=max(1, output_tokens),
        gap_s=max(0.0, gap_s or 0.0) if n else 0.0,
        request_messages=call.request_messages,
    )


def _spoken(reply: list[dict[str, Any]]) -> Any:
    """What the model itself wrote of a recorded message: text, or the calls when there are any."""
    if not reply:
        return ""
    calls = [call.get("function") for call in reply[0].get("tool_calls") or ()]
    return [reply[0].get("content") or "", calls] if calls else reply[0].get("content") or ""
