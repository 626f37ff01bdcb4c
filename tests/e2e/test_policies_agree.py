"""The policy decides when a call runs, never what it answers: live, on real weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the catalog extra is not installed")

from tokenizers import Tokenizer

from talaria_common.wire import CallKey
from talaria_instance import catalog
from talaria_instance.engine.protocol import EngineRequest
from talaria_instance.engine.torch.text import ModelText
from tests.e2e.reference import SMALL_GAP, next_logits, top2_gap
from tests.e2e.stacks import Stack, running

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

MODELS = ("tiny-a", "tiny-b")
SESSIONS = 4
CALLS = 3
# Short rounds, so that slots close on unfinished calls and models take turns often.
ROUNDS = "[instance]\nt_ttft_s = 1.0\n"

Answers = dict[tuple[int, int], tuple[dict[str, Any], str]]
"""(session, call) -> the body sent, the text that came back."""


def _user(session: int, call: int) -> dict[str, str]:
    text = f"Agent {session}, step {call}: list the files, then say what to change. " * 6
    return {"role": "user", "content": text}


def _run_session(stack: Stack, session: int) -> Answers:
    """A session whose prompts are planned, so that they are the same whatever is answered."""
    answers: Answers = {}
    messages: list[dict[str, str]] = []
    with stack.http(120) as http:
        for call in range(CALLS):
            messages.append(_user(session, call))
            body = {
                "model": MODELS[session % len(MODELS)],
                "messages": list(messages),
                "temperature": 0,
                "max_tokens": 40,
                "ignore_eos": True,
            }
            headers = {"X-Session-ID": f"agree-{session}"}
            answer = http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            answers[session, call] = (body, answer.json()["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": f"I have done step {call}."})
    return answers


def _run(policy: str) -> Answers:
    models = ",".join(MODELS)
    args = ("--engine", "torch", "--policy", policy, "--models", models)
    with (
        running(*args, config=ROUNDS, within_s=240) as stack,
        ThreadPoolExecutor(SESSIONS) as pool,
    ):
        parts = pool.map(lambda n: _run_session(stack, n), range(SESSIONS))
        return {key: value for part in parts for key, value in part.items()}


def test_talaria_and_round_only_give_the_same_answers() -> None:
    """Equal up to the first position where the reference's two best logits nearly tie."""
    ours, theirs = _run("talaria"), _run("round-only")
    assert len(ours) == SESSIONS * CALLS
    early = 0
    for key, (body, text) in ours.items():
        other = theirs[key][1]
        if text != other:
            gap = _gap_where_they_part(body, text, other)
            assert gap < SMALL_GAP, f"{key}: {text!r} or {other!r}; top-2 logit gap {gap:.2e}"
            early += 1
    assert early <= max(1, len(ours) // 100)


def _gap_where_they_part(body: dict[str, Any], text: str, other: str) -> float:
    entries = catalog.default_entries(catalog.default_cache())
    entry = next(e for e in entries if e.id == body["model"])
    request = EngineRequest(key=CallKey("x"), model=entry.id, endpoint="chat", body=body)
    side = ModelText(Path(entry.path), entry.chat_template)
    prompt = side.prepare(request, entry.max_model_len).tokens
    tokenizer = Tokenizer.from_file(f"{entry.path}/tokenizer.json")
    one, two = (tokenizer.encode(t, add_special_tokens=False).ids for t in (text, other))
    at = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    return top2_gap(next_logits(entry.path, prompt, one[: at + 1])[at])
