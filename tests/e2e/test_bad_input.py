"""Bad input: each kind gets its own 4xx and param, and disturbs nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.stacks import Stack, chat_body, events, running

HI = [{"role": "user", "content": "Hi."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def _json(**changes: Any) -> bytes:
    return json.dumps({"model": "MODEL", "messages": HI, "max_tokens": 4} | changes).encode()


# name: (body, status, code, param)
BAD: dict[str, tuple[bytes, int, str, str | None]] = {
    "malformed JSON": (b'{"model": "MODEL", "messages": [', 400, "invalid_request", None),
    "not an object": (b"[]", 400, "invalid_request", None),
    "empty messages": (_json(messages=[]), 400, "invalid_request", "messages"),
    "unknown role": (
        _json(messages=[{"role": "wizard", "content": "Hi."}]),
        400,
        "invalid_request",
        "messages[0].role",
    ),
    "unknown model": (_json(model="no-such-model"), 404, "unknown_model", "model"),
    "max_tokens 0": (_json(max_tokens=0), 400, "invalid_request", "max_tokens"),
    "max_tokens -1": (_json(max_tokens=-1), 400, "invalid_request", "max_tokens"),
    "max_tokens 1.5": (_json(max_tokens=1.5), 400, "invalid_request", "max_tokens"),
    "max_tokens 1e9": (_json(max_tokens=1e9), 400, "invalid_request", "max_tokens"),
    "max_tokens 1000000000": (_json(max_tokens=10**9), 400, "invalid_request", "max_tokens"),
    "temperature NaN": (_json(temperature=float("nan")), 400, "invalid_request", "temperature"),
    "over the context": (
        _json(messages=[{"role": "user", "content": "word " * 20_000}]),
        400,
        "context_length_exceeded",
        "messages",
    ),
    "20 MB": (
        _json(messages=[{"role": "user", "content": "x" * 20_000_000}]),
        413,
        "too_large",
        None,
    ),
    "lone surrogate": (
        _json(messages=[{"role": "user", "content": "\ud83d"}]),
        400,
        "invalid_request",
        "messages",
    ),
    "tool message without id": (
        _json(
            messages=[
                *HI,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "a"},
            ]
        ),
        400,
        "invalid_request",
        "messages[2].tool_call_id",
    ),
    "unsupported parameter": (
        _json(logit_bias={"1": 5}),
        400,
        "unsupported_parameter",
        "logit_bias",
    ),
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running("--engine", "fake") as stack:
        yield stack


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_refused_by_name_and_disturbs_nobody(stack: Stack, stream: bool) -> None:
    with stack.http(60) as http, ThreadPoolExecutor(1) as pool:
        model = http.get("/v1/models").json()["data"][0]["id"]
        running_body = chat_body(model, "Story.", max_tokens=400, ignore_eos=True, stream=True)

        def read() -> tuple[int, str]:
            with (
                stack.http(60) as mine,
                mine.stream("POST", "/v1/chat/completions", json=running_body) as response,
            ):
                got = list(events(response))
            return len(got), str(got[-1])

        undisturbed = pool.submit(read)
        for name, (body, status, code, param) in BAD.items():
            sent = body.replace(b"MODEL", model.encode())
            if stream and sent.startswith(b'{"model"') and sent.endswith(b"}"):
                sent = sent[:-1] + b', "stream": true}'
            answer = http.post("/v1/chat/completions", content=sent)
            assert answer.status_code == status, (name, answer.status_code, answer.text[:300])
            error = answer.json()["error"]
            assert error["code"] == code, (name, error)
            if param is not None:
                assert error["param"] == param, (name, error)
        count, last = undisturbed.result()
        assert last == "[DONE]"
        assert count > 4


def test_over_the_context_names_both_counts(stack: Stack) -> None:
    with stack.http() as http:
        entry = http.get("/v1/models").json()["data"][0]
        body = chat_body(entry["id"], "word " * 20_000)
        message = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
        numbers = [
            int(word)
            for word in message.replace(",", " ").replace(".", " ").split()
            if word.isdigit()
        ]
        assert entry["max_model_len"] in numbers
        assert any(n > entry["max_model_len"] for n in numbers)


def test_a_body_just_below_the_limit_arrives_whole(stack: Stack) -> None:
    with stack.http(60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        filler = {"padding": "x" * 6_000_000}
        answer = http.post(
            "/v1/chat/completions", json=chat_body(model, "Hi.", max_tokens=1, metadata=filler)
        )
        assert answer.status_code == 200, answer.text[:300]


def test_the_port_of_another_server_is_a_clear_message(stack: Stack) -> None:
    import subprocess
    import sys

    port = httpx.URL(stack.url).port
    command = [
        sys.executable,
        "-m",
        "talaria_cli.main",
        "up",
        "--engine",
        "fake",
        "--port",
        str(port),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
