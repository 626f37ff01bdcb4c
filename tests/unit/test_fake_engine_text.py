"""Prompts, scripts and output limits of the fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_common.errors import Rejected
from talaria_common.wire import CallKey, ToolDelta
from talaria_instance.engine.fake_sequence import FakePayload, FakeSequence
from talaria_instance.engine.fake_text import (
    TOKEN_BYTES,
    cut_at_stop,
    held_length,
    parameters,
    prompt_tokens,
    script_of,
)
from talaria_instance.engine.protocol import EngineCall, EngineRequest

USER = {"role": "user", "content": "What is up?"}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"enum": ["ls -la"]}},
            "required": ["command"],
        },
    },
}


def request(*messages: Any, model: str = "m", endpoint: Any = "chat", **body: Any) -> EngineRequest:
    body = body if endpoint == "completions" else {"messages": list(messages)} | body
    return EngineRequest(key=CallKey("c"), model=model, endpoint=endpoint, body=body)


class Heard:
    """A sink for one call."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.tools: list[ToolDelta] = []
        self.tokens = 0

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        self.pieces += [text] if text else []
        self.tools += tool_calls
        self.tokens += tokens


def generate(asked: EngineRequest, max_tokens: int = 1000) -> tuple[FakeSequence, Heard, str]:
    """All output of a call."""
    limits = parameters(asked)
    tokens = prompt_tokens(asked)
    payload = FakePayload(
        tokens=tokens,
        root=b"",
        hashes=(),
        limits=limits,
        script=script_of(asked, tokens, limits),
        session="",
        tool_call_id="call_1",
        is_faulty=False,
    )
    call = EngineCall(
        key=asked.key,
        model="m",
        prompt_tokens=len(tokens) // TOKEN_BYTES,
        max_tokens=limits.max_tokens or max_tokens,
        blocks_needed=1,
        payload=payload,
    )
    sequence, heard = FakeSequence(call, payload), Heard()
    while (finish := sequence.generate(heard)) is None:  # type: ignore[arg-type]
        pass
    return sequence, heard, finish


def test_a_reply_has_the_same_tokens_in_the_next_prompt() -> None:
    first = request(USER)
    sequence, heard, finish = generate(first)
    assert finish == "stop"
    reply = {"role": "assistant", "content": "".join(heard.pieces)}
    then = prompt_tokens(request(USER, reply, {"role": "user", "content": "And then?"}))
    assert then.startswith(bytes(sequence.tokens))


def test_a_tool_call_has_the_same_tokens_in_the_next_prompt() -> None:
    sequence, heard, finish = generate(request(USER, tools=[BASH], tool_choice="required"))
    assert finish == "tool_calls"
    arguments = "".join(delta.arguments for delta in heard.tools)
    assert arguments == '{"command":"ls -la"}'
    function = {"name": "bash", "arguments": arguments}
    reply = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    result = {"role": "tool", "content": "a.txt", "tool_call_id": "call_1"}
    then = prompt_tokens(request(USER, reply, result, tools=[BASH]))
    assert then.startswith(bytes(sequence.tokens))


def test_histories_that_differ_in_their_tool_calls_alone_differ() -> None:
    def history(command: str) -> bytes:
        call = {"function": {"name": "bash", "arguments": command}}
        return prompt_tokens(request(USER, {"role": "assistant", "tool_calls": [call]}))

    assert history("{}") != history('{"a":1}')
    assert history("{}") != prompt_tokens(request(USER, {"role": "assistant", "content": "{}"}))


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null content": (
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
    ),
    "absent content": ({"role": "assistant"}, {"role": "assistant", "content": ""}),
    "parts": (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
    "a volatile line": (
        {"role": "system", "content": "x-anthropic-billing-header: 17\nBe brief."},
        {"role": "system", "content": "Be brief."},
    ),
    "empty tool calls": (
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant", "content": "a"},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_what_means_the_same_has_the_same_tokens(case: str) -> None:
    left, right = SAME[case]
    assert prompt_tokens(request(USER, left)) == prompt_tokens(request(USER, right))


def test_equal_prompts_get_equal_text_and_others_another() -> None:
    texts = [
        "".join(generate(asked)[1].pieces)
        for asked in (
            request(USER),
            request(USER, temperature=1.0, seed=3),
            request(USER, model="n"),
            request({"role": "user", "content": "What is on?"}),
        )
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_text_ends_by_itself_unless_told_to_go_on() -> None:
    short, _, finish = generate(request(USER))
    assert finish == "stop"
    assert 24 < short.generated < 70
    long, _, finish = generate(request(USER, ignore_eos=True, max_tokens=200))
    assert (finish, long.generated) == ("length", 200)
    least, _, finish = generate(request(USER, min_tokens=120))
    assert finish == "stop"
    assert least.generated >= 120


def test_characters_are_never_cut() -> None:
    text = "多字节字符必须完整。日本語もそのまま。한국어도 그대로."
    schema = {"type": "object", "properties": {"v": {"enum": [text]}}, "required": ["v"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    sequence, heard, finish = generate(request(USER, response_format=form))
    assert "".join(heard.pieces) == '{"v":"' + text + '"}'
    assert finish == "stop"
    assert len(heard.pieces) > 10
    assert "�" not in "".join(heard.pieces)
    assert heard.tokens == sequence.generated - 1


def test_a_tool_call_cut_by_max_tokens_says_length() -> None:
    _, heard, finish = generate(request(USER, tools=[BASH], tool_choice="required", max_tokens=3))
    assert finish == "length"
    assert [delta.name for delta in heard.tools] == ["bash"]


def test_a_stop_string_across_tokens_is_never_sent() -> None:
    whole = "".join(generate(request(USER))[1].pieces)
    stop = whole[10:23]
    _, heard, finish = generate(request(USER, stop=[stop]))
    assert ("".join(heard.pieces), finish) == (whole[: whole.index(stop)], "stop")


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    whole = "".join(generate(request(USER, min_tokens=60))[1].pieces)
    _, heard, _ = generate(request(USER, stop=[whole[4:8]], min_tokens=60))
    assert len("".join(heard.pieces).encode()) >= 60 * TOKEN_BYTES


def test_the_text_before_the_earliest_stop_string_is_kept() -> None:
    assert cut_at_stop("abcd", ["cd", "bc"]) == "a"
    assert cut_at_stop("abcd", ["x"]) is None
    assert held_length("abcd", ["dex", "cdx"]) == 2
    assert held_length("abcd", ["abcd"]) == 0


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": []}, "invalid_request", "messages"),
    "unknown role": ({"messages": [{"role": "wizard"}]}, "invalid_request", "messages"),
    "max_tokens 0": ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    "max_tokens 1.5": ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
    "tools an object": ({"tools": {"bash": {}}}, "invalid_request", "tools"),
    "tool without name": ({"tools": [{"function": {}}]}, "invalid_request", "tools"),
    "choice not offered": (
        {"tools": [BASH], "tool_choice": {"function": {"name": "rm"}}},
        "invalid_request",
        "tool_choice",
    ),
    "choice without tools": ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
    "unknown format": ({"response_format": {"type": "x"}}, "invalid_request", "response_format"),
    "schema of unknown type": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "invalid_request",
        "response_format",
    ),
    "logprobs": ({"logprobs": True}, "unsupported_parameter", "logprobs"),
    "n": ({"n": 2}, "unsupported_parameter", "n"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str) -> None:
    body, code, param = REFUSED[case]
    asked = request(USER, **body)
    with pytest.raises(Rejected) as caught:
        script_of(asked, prompt_tokens(asked), parameters(asked))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_completions_take_a_text_or_token_ids() -> None:
    text = prompt_tokens(request(endpoint="completions", prompt="Once upon"))
    assert text == prompt_tokens(request(endpoint="completions", prompt=["Once upon"]))
    assert len(prompt_tokens(request(endpoint="completions", prompt=[1, 2, 3]))) == 3 * TOKEN_BYTES
    assert parameters(request(endpoint="completions", prompt="x")).max_tokens == 16
    for bad in ("", [], ["a", "b"], [-1], None):
        with pytest.raises(Rejected) as caught:
            prompt_tokens(request(endpoint="completions", prompt=bad))
        assert caught.value.param == "prompt"
