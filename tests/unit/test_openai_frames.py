"""What clients see: chunks, whole answers, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from talaria_common.errors import Rejected, Unavailable
from talaria_common.wire import CallKey, Delta, Ended, Endpoint, EndReason, ToolDelta, Usage
from talaria_gateway.openai import DONE, Frames, error_object, retry_after

KEY = CallKey("01J")
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)


def frames(endpoint: Endpoint = "chat", *, with_usage: bool = False) -> Frames:
    return Frames(endpoint, "01J", "m", 1_700_000_000.5, with_usage=with_usage)


def delta(text: str = "", *calls: ToolDelta) -> Delta:
    return Delta(key=KEY, seq=0, text=text, tool_calls=calls, tokens=1)


def ended(finish: Any = "stop") -> Ended:
    return Ended(key=KEY, seq=9, reason=EndReason.FINISHED, finish_reason=finish, usage=USAGE)


def events(data: bytes) -> list[Any]:
    blocks = [block.removeprefix(b"data: ") for block in data.split(b"\n\n") if block]
    return [block.decode() if block == b"[DONE]" else json.loads(block) for block in blocks]


def test_the_role_comes_once_and_first_and_the_finish_once_and_last() -> None:
    f = frames()
    *chunks, done = events(f.chunks(delta("Hel")) + f.chunks(delta("lo")) + f.end(ended()))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert {(c["id"], c["object"], c["model"], c["created"]) for c in chunks} == {
        ("chatcmpl-01J", "chat.completion.chunk", "m", 1_700_000_000)
    }
    assert done == "[DONE]"


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    *_, usage, done = events(frames(with_usage=True).end(ended()))
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert done == "[DONE]"
    assert not any("usage" in e for e in events(frames().end(ended())) if e != "[DONE]")


def test_a_tool_call_is_named_in_its_first_piece_only() -> None:
    f = frames()
    data = f.chunks(delta("", ToolDelta(index=0, id="c1", name="ls", arguments='{"a"')))
    data += f.chunks(delta("", ToolDelta(index=0, arguments=": 1}")))
    _, first, second = events(data)
    assert first["choices"][0]["delta"] == {
        "tool_calls": [
            {
                "index": 0,
                "function": {"name": "ls", "arguments": '{"a"'},
                "id": "c1",
                "type": "function",
            }
        ]
    }
    assert second["choices"][0]["delta"]["tool_calls"] == [
        {"index": 0, "function": {"arguments": ": 1}"}}
    ]


def test_an_index_comes_once_in_a_chunk() -> None:
    pieces = (
        ToolDelta(index=0, id="c1", name="ls", arguments="{"),
        ToolDelta(index=0, arguments="}"),
        ToolDelta(index=1, id="c2", name="cat", arguments=""),
    )
    _, chunk = events(frames().chunks(delta("", *pieces)))
    calls = chunk["choices"][0]["delta"]["tool_calls"]
    assert [(c["index"], c["function"]["arguments"]) for c in calls] == [(0, "{}"), (1, "")]


def test_text_chunks_carry_no_tool_calls() -> None:
    _, chunk = events(frames().chunks(delta("Hi")))
    assert "tool_calls" not in chunk["choices"][0]["delta"]


def test_an_answer_without_tokens_still_has_role_finish_and_done() -> None:
    role, finish, done = events(frames().end(ended("length")))
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert (finish["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


def test_completions_have_their_own_form() -> None:
    f = frames("completions")
    text, finish, done = events(f.chunks(delta("Hi")) + f.end(ended()))
    assert (text["object"], text["id"]) == ("text_completion", "cmpl-01J")
    assert text["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None}]
    assert (finish["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    f = frames("completions")
    f.collect(delta("Hi"))
    whole = json.loads(f.whole(ended()))
    assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "Hi")


def test_whole_and_streamed_answers_say_the_same() -> None:
    f = frames()
    for piece in ("多字", "节 😀"):
        f.collect(delta(piece))
    whole = json.loads(f.whole(ended("length")))
    assert whole["object"] == "chat.completion"
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "多字节 😀"}
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_whole_tool_calls_are_put_together_by_index() -> None:
    f = frames()
    f.collect(delta("", ToolDelta(index=0, id="c1", name="ls", arguments='{"a": ')))
    f.collect(delta("", ToolDelta(index=1, id="c2", name="cat", arguments="{}")))
    f.collect(delta("", ToolDelta(index=0, arguments="1}")))
    message = json.loads(f.whole(ended("tool_calls")))["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "cat", "arguments": "{}"}},
    ]


@pytest.mark.parametrize("text", ["\r\n\r\ndata: x", "\u2028\u0085", '"\\'])
def test_no_text_can_break_the_framing(text: str) -> None:
    data = frames().chunks(delta(text))
    assert data.count(b"\n\n") == 2
    assert b"\r" not in data
    assert events(data)[1]["choices"][0]["delta"]["content"] == text


def test_the_end_is_said_once() -> None:
    assert frames(with_usage=True).end(ended()).count(DONE) == 1


def test_errors_have_openais_form_and_say_when_to_try_again() -> None:
    error = Rejected("invalid_request", "max_tokens must be at least 1", param="max_tokens")
    assert error_object(error) == {
        "error": {
            "message": "max_tokens must be at least 1",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "invalid_request",
        }
    }
    assert retry_after(error) is None
    assert retry_after(Unavailable("overloaded", "full", retry_after_s=2.2)) == "3"
    assert retry_after(Unavailable("no_instance", "none")) == "1"
    assert error_object(Unavailable("overloaded", "full"))["error"]["type"] == "rate_limit_error"
