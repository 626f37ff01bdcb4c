"""Closed-loop replay of a workload against an OpenAI-compatible endpoint. IO (HTTP).

All sessions start at once; within a session the next call arrives its tool gap after the last
token of the previous answer. Everything is measured here, at the client: TTFT from the *intended*
arrival, so that a late client or a refused call cannot make it look better.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import msgspec

from talaria_sim.fit import Speed
from talaria_sim.records import CallRecord, RunRecord, SessionRecord
from talaria_sim.sse import Answer, ErrorAnswer, read_answer
from talaria_sim.texts import WORDS, bodies
from talaria_sim.workload import SessionPlan, Workload

SILENCE_MAX_S: Final = 60.0
"""Without one byte, keep-alive comments included, for so long, a call counts as failed."""
SHED_MAX: Final = 100
"""Refusals after which a call counts as failed."""
BLOCK_TOKENS: Final = 16
"""Alignment up to which a continuation can reuse its earlier prompt."""


PROBE_PROMPT_WORDS: Final = 128
PROBE_OUTPUT_TOKENS: Final = 9


class _Probe(NamedTuple):
    sent_s: float
    first_token_s: float
    ended_s: float


class ReplayFailed(Exception):
    """The endpoint cannot be replayed against; the text says what to do."""


@dataclass
class Progress:
    """Where a replay stands; `changed` is called on each step."""

    sessions: int
    calls: int
    sessions_done: int = 0
    calls_done: int = 0
    calls_failed: int = 0
    started_s: float = field(default_factory=time.monotonic)
    changed: Callable[[Progress], None] = lambda progress: None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def remaining_s(self) -> float | None:
        """At the pace so far; None before the first call is done."""
        if not self.calls_done:
            return None
        return self.elapsed_s / self.calls_done * (self.calls - self.calls_done)


async def served_models(url: str) -> list[str]:
    """Ids of the models behind `url`, in its order. Raises `ReplayFailed` if it does not answer."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
            answer = await http.get("/v1/models")
            answer.raise_for_status()
            return [str(entry["id"]) for entry in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ReplayFailed(
            f"{url} does not serve /v1/models ({error!r}); start a stack with `talaria up`, "
            "or leave --url out"
        ) from error


async def warm_up(url: str, models: Sequence[str]) -> dict[str, Speed]:
    """Two calls to each model, not counted: no policy pays for first touches, and speeds are known."""
    speeds: dict[str, Speed] = {}
    async with httpx.AsyncClient(base_url=url, timeout=_timeout(), trust_env=False) as http:
        for model in models:
            await _probe(http, model, "first touch", 32)
            answer = await _probe(http, model, "measured", PROBE_PROMPT_WORDS)
            first_s = answer.first_token_s - answer.sent_s
            speeds[model] = Speed(
                prefill_token_s=first_s / PROBE_PROMPT_WORDS,
                decode_step_s=(answer.ended_s - answer.first_token_s) / (PROBE_OUTPUT_TOKENS - 1),
            )
    return speeds


async def _probe(http: httpx.AsyncClient, model: str, name: str, words: int) -> _Probe:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join([name, *WORDS[:words]])}],
        "max_tokens": PROBE_OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    headers = {"X-Session-ID": f"warm-up, {name}, {model}", "X-Talaria-Session-Final": "true"}
    sent_s = time.monotonic()
    try:
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            answer = await read_answer(response, time.monotonic)
    except httpx.HTTPError as error:
        raise ReplayFailed(f"{model} does not answer: {error!r}") from error
    if isinstance(answer, ErrorAnswer):
        raise ReplayFailed(f"{model} does not answer: {answer.status} {answer.code}: {answer.text}")
    return _Probe(sent_s, answer.first_token_s, answer.ended_s)


def _timeout() -> httpx.Timeout:
    return httpx.Timeout(10.0, read=SILENCE_MAX_S, write=30.0, pool=None)


async def replay(
    workload: Workload,
    models: dict[str, str],
    url: str,
    *,
    id_prefix: str = "",
    progress: Progress | None = None,
) -> RunRecord:
    """Run every session once; `models` maps the workload's labels to served ids."""
    progress = progress or Progress(len(workload.sessions), workload.calls)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prepared = [bodies(s, models[s.label], workload.seed) for s in workload.sessions]
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=_timeout(), trust_env=False
    ) as http:
        started_unix_s, start_s = time.time(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    _Agent(http, session, models[session.label], id_prefix, start_s).run(
                        prompts, progress
                    )
                )
                for session, prompts in zip(workload.sessions, prepared, strict=True)
            ]
        wall_s = time.monotonic() - start_s
        done = [task.result() for task in tasks]
        sessions = [msgspec.structs.replace(s, document=await _document(http, s.id)) for s in done]
    return RunRecord(
        sessions=tuple(sessions),
        started_unix_s=started_unix_s,
        wall_s=wall_s,
    )


class _Agent:
    """One session's client."""

    def __init__(
        self, http: httpx.AsyncClient, plan: SessionPlan, model: str, id_prefix: str, start_s: float
    ) -> None:
        self._http = http
        self._plan = plan
        self._model = model
        self._start_s = start_s
        self._id = f"{id_prefix}{plan.id}"
        self._before: CallRecord | None = None

    async def run(self, prompts: Sequence[dict[str, Any]], progress: Progress) -> SessionRecord:
        calls: list[CallRecord] = []
        for index, body in enumerate(prompts):
            record = await self._call(index, body, is_final=index == len(prompts) - 1)
            calls.append(record)
            progress.calls_done += record.outcome == "finished"
            progress.calls_failed += record.outcome == "failed"
            progress.changed(progress)
            if record.outcome != "finished":
                progress.calls -= len(prompts) - index - (record.outcome == "failed")
                await self._end()
                break
            self._before = record
        progress.sessions_done += 1
        progress.changed(progress)
        return SessionRecord(
            id=self._id,
            label=self._plan.label,
            model=self._model,
            planned_calls=len(prompts),
            calls=tuple(calls),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _call(self, index: int, body: dict[str, Any], *, is_final: bool) -> CallRecord:
        plan = self._plan.calls[index]
        intended_s = (self._before.ended_s if self._before else 0.0) + plan.gap_s
        await asyncio.sleep(max(0.0, intended_s - self._now_s()))
        headers = {"X-Session-ID": self._id, "Content-Type": "application/json"}
        if is_final:
            headers["X-Talaria-Session-Final"] = "true"
        content = msgspec.json.encode(body)
        times_shed = 0
        while True:
            answer = await self._send(content, headers)
            if not (isinstance(answer, ErrorAnswer) and answer.status == 429):
                break
            times_shed += 1
            if times_shed >= SHED_MAX:
                break
            await asyncio.sleep(answer.retry_after_s)
        return self._record(index, intended_s, answer, times_shed)

    async def _send(self, content: bytes, headers: dict[str, str]) -> Answer | ErrorAnswer:
        try:
            async with self._http.stream(
                "POST", "/v1/chat/completions", content=content, headers=headers
            ) as response:
                return await read_answer(response, self._now_s)
        except httpx.HTTPError as error:
            return ErrorAnswer(status=0, code=type(error).__name__, text=str(error) or repr(error))

    def _record(
        self, index: int, intended_s: float, answer: Answer | ErrorAnswer, times_shed: int
    ) -> CallRecord:
        plan = self._plan.calls[index]
        if isinstance(answer, ErrorAnswer):
            is_cut = answer.status == 400 and answer.code == "context_length_exceeded"
            return CallRecord(
                index=index,
                intended_s=intended_s,
                ended_s=self._now_s(),
                outcome="cut_by_context" if is_cut else "failed",
                error=f"{answer.status or 'no answer'} {answer.code}: {answer.text}",
                times_shed=times_shed,
                planned_prompt_tokens=plan.prompt_tokens,
            )
        before = self._before
        return CallRecord(
            index=index,
            intended_s=intended_s,
            first_token_s=answer.first_token_s,
            ended_s=answer.ended_s,
            outcome="finished",
            times_shed=times_shed,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            planned_prompt_tokens=plan.prompt_tokens,
            covers_before=(
                answer.cached_tokens > before.prompt_tokens - BLOCK_TOKENS
                if before and self._plan.extends(index)
                else None
            ),
        )

    async def _end(self) -> None:
        """Close a session that stopped before its last planned call."""
        try:
            await self._http.delete(f"/v1/sessions/{quote(self._id, safe='')}")
        except httpx.HTTPError:
            return  # It ends by its idle time instead.


async def _document(http: httpx.AsyncClient, session: str) -> dict[str, Any] | None:
    """The stack's own account of a session; None where there is none."""
    try:
        answer = await http.get(f"/v1/sessions/{quote(session, safe='')}")
        document = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return document if isinstance(document, dict) else None
