"""What a user does first, on real weights: ask, stream, call tools, replay recorded agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from talaria_client import Client
from tests.e2e.stacks import Stack, chat_body, eventually, in_flight, running

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
TRACES = Path(__file__).resolve().parents[3] / "shared/traces/messages"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running("--engine", "torch", within_s=240) as stack:
        yield stack


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_the_capital_of_france_is_paris_streamed_or_not(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
    text = whole.choices[0].message.content or ""
    assert "Paris" in text
    stream = sdk.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text


async def test_the_nats_client_gets_the_same_text(stack: Stack) -> None:
    async with Client.connect(stack.nats_url) as client:
        chunks = client.chat(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
        over_nats = "".join([chunk.text async for chunk in chunks])
    with stack.http() as http:
        body = chat_body(MODEL, CAPITAL[0]["content"], max_tokens=32)
        over_http = http.post("/v1/chat/completions", json=body).json()
    assert "Paris" in over_nats
    assert over_nats == over_http["choices"][0]["message"]["content"]


def test_a_json_schema_is_kept(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        temperature=0,
        max_tokens=120,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "strict": True, "schema": CITY},
        },
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert set(value) == {"city", "population"}
    assert [type(value[key]) for key in ("city", "population")] == [str, int]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_forced_tool_call_fits_its_schema(stack: Stack, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": CITY}}
    body = chat_body(
        MODEL,
        "Look up Paris.",
        max_tokens=120,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "lookup"}},
    )
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        if stream:
            arguments, finish = "", None
            for chunk in sdk.chat.completions.create(**body, stream=True):
                for delta in chunk.choices[0].delta.tool_calls or []:
                    arguments += (delta.function and delta.function.arguments) or ""
                finish = chunk.choices[0].finish_reason or finish
        else:
            choice = sdk.chat.completions.create(**body).choices[0]
            arguments = choice.message.tool_calls[0].function.arguments
            finish = choice.finish_reason
    assert finish in {"tool_calls", "stop"}
    assert set(json.loads(arguments)) == {"city", "population"}


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces/messages is not there")
def test_recorded_agents_reuse_their_earlier_prompt(stack: Stack) -> None:
    block_tokens = 16
    with stack.http(120) as http:
        for file in sorted(TRACES.glob("deepseek*.json"))[:2]:
            recorded = json.loads(file.read_text())
            _replay(http, recorded, f"real-{file.stem}", block_tokens)


def _replay(http: Any, recorded: dict[str, Any], session: str, block_tokens: int) -> None:
    earlier = 0
    for call in recorded["calls"][:4]:
        body = {
            "model": MODEL,
            "messages": recorded["messages"][: call["request_messages"]],
            "tools": recorded["tools"],
            "max_tokens": 8,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= earlier // block_tokens * block_tokens, (session, earlier, usage)
        earlier = usage["prompt_tokens"]


def test_a_switch_in_between_keeps_the_answer_and_the_prefix(stack: Stack) -> None:
    prompt = "Count slowly to one hundred, one number per line. " * 12
    with stack.http(120) as http:
        body = chat_body(MODEL, prompt, max_tokens=24)
        first = http.post("/v1/chat/completions", json=body).json()
        other = http.post("/v1/chat/completions", json=chat_body("tiny-a", "Hello.", max_tokens=4))
        assert other.status_code == 200
        second = http.post("/v1/chat/completions", json=body).json()
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (first["usage"]["prompt_tokens"] - 1) // 16 * 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_stops_the_work(stack: Stack, stream: bool) -> None:
    with stack.http() as http:
        body = chat_body(MODEL, "Go on for ever.", max_tokens=4000, ignore_eos=True, stream=stream)
        with stack.http(1.5) as leaving:
            if stream:
                with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert next(response.iter_raw())
                    eventually(lambda: in_flight(http) == 1, 2, "the call runs")
            else:
                with pytest.raises(httpx.ReadTimeout):
                    leaving.post("/v1/chat/completions", json=body)
        eventually(lambda: in_flight(http) == 0, 2, "the engine stops for a client that left")
