"""Form and range of calls: what is refused, by which name, and what is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from talaria_common.errors import Rejected
from talaria_gateway.json_body import decode_object
from talaria_gateway.validate import CheckedCall, check

HI = {"role": "user", "content": "Hi."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
ANSWERED = [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def checked(**fields: Any) -> CheckedCall:
    body = {"model": "m", "messages": [HI]} | fields
    raw = json.dumps(body).encode()
    return check("chat", decode_object(raw), raw)


def refusal(**fields: Any) -> Rejected:
    with pytest.raises(Rejected) as refused:
        checked(**fields)
    return refused.value


OUT_OF_RANGE: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, 1e9, 10**9, 10**30, "5", True],
    "max_completion_tokens": [0, 2_000_000],
    "min_tokens": [-1],
    "temperature": [-0.1, 2.1, "warm", True],
    "top_p": [0, -1, 1.1],
    "top_k": [-2, 1.5],
    "seed": ["x", 2**64],
    "stop": [5, [""], ["x" * 257], ["a"] * 17, [1]],
    "stream": ["yes", 1],
    "stream_options": ["x"],
    "ignore_eos": [1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("invalid_request", name)
    assert name in error.detail


UNSUPPORTED: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "echo": True,
    "suffix": "end",
    "logprobs": True,
    "top_logprobs": 5,
    "logit_bias": {"1": 5},
    "allowed_token_ids": [1],
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "functions": [{"name": "f"}],
}


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_cannot_be_honoured_is_refused_not_ignored(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)


NEUTRAL: dict[str, list[Any]] = {
    "n": [1, None],
    "logprobs": [False, None],
    "top_logprobs": [0, None],
    "logit_bias": [{}, None],
    "suffix": [None, ""],
    "echo": [False],
    "modalities": [["text"]],
    "presence_penalty": [0, 0.0],
    "allowed_token_ids": [[], None],
    "stop": [None, "x", ["a", "b"]],
    "max_tokens": [None, 1, 1_000_000],
    "tools": [[], None, [TOOL]],
    "tool_choice": [None, "auto", "none"],
    "response_format": [None, {"type": "text"}, {"type": "json_object"}],
    "some_new_field": [{"a": [1]}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NEUTRAL.items() for value in values]
)
def test_a_value_that_asks_for_nothing_special_is_taken(name: str, value: Any) -> None:
    assert checked(**{name: value}).model == "m"


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": (None, "messages"),
    "empty": ([], "messages"),
    "an object": ({}, "messages"),
    "not objects": (["Hi."], "messages[0]"),
    "unknown role": ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    "no role": ([{"content": "x"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "a number": ([{"role": "user", "content": 5}], "messages[0].content"),
    "part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
    ),
    "part without type": (
        [{"role": "user", "content": [{"text": "x"}]}],
        "messages[0].content[0].type",
    ),
    "tool result without id": (
        [*ANSWERED, {"role": "tool", "content": "a"}],
        "messages[2].tool_call_id",
    ),
    "calls of a user": ([HI | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
    "calls an object": ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    "call without function": (
        [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}],
        "messages[0].tool_calls[0].function",
    ),
    "call without name": (
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    "broken arguments": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments no object": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments an object": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_bad_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    error = refusal(messages=messages)
    assert (error.code, error.param) == ("invalid_request", param)


def test_an_image_is_unsupported_and_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refusal(messages=[{"role": "user", "content": [image]}])
    assert (error.code, error.param) == ("unsupported_parameter", "messages[0].content[0].type")


def test_more_messages_than_the_limit_are_refused() -> None:
    assert refusal(messages=[HI] * 10_001).param == "messages"
    assert len(checked(messages=[HI] * 10_000).messages) == 10_000


GOOD_HISTORIES = {
    "empty tool_calls": [HI, {"role": "assistant", "content": "Hello.", "tool_calls": []}, HI],
    "null content": [*ANSWERED, {"role": "tool", "tool_call_id": "call_1", "content": "a"}],
    "absent content": [HI, {"role": "assistant", "tool_calls": [CALL]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
    "developer": [{"role": "developer", "content": "Be short."}, HI],
}


@pytest.mark.parametrize("messages", GOOD_HISTORIES.values(), ids=GOOD_HISTORIES.keys())
def test_a_history_as_clients_write_it_is_taken_unchanged(messages: Any) -> None:
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    assert check("chat", decode_object(raw), raw).raw is raw


def test_empty_arguments_become_an_empty_object_in_the_body_that_goes_on() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    sent = checked(messages=[HI, {"role": "assistant", "tool_calls": [call]}]).raw
    assert json.loads(sent)["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_volatile_line_counts_neither_for_the_chain_nor_in_the_prompt() -> None:
    lines = [f"x-anthropic-billing-header: cch={n};\nYou are an agent." for n in ("a1", "b2")]
    calls = [checked(messages=[{"role": "system", "content": line}, HI]) for line in lines]
    assert calls[0].links("t") == calls[1].links("t")
    assert json.loads(calls[0].raw)["messages"][0]["content"] == "You are an agent."
    parts = [{"type": "text", "text": lines[0]}]
    cleaned = checked(messages=[{"role": "system", "content": parts}, HI])
    assert b"billing" not in cleaned.raw


def test_the_chain_tells_tenants_models_tools_and_templates_apart() -> None:
    calls = [
        checked(),
        checked(model="m2"),
        checked(tools=[TOOL]),
        checked(chat_template_kwargs={"thinking": True}),
    ]
    chains = [call.links("t")[-1] for call in calls] + [calls[0].links("u")[-1]]
    assert len({link.digest for link in chains}) == len(chains)


BAD_TOOLS: dict[str, tuple[dict[str, Any], str]] = {
    "an object": ({"tools": {"ls": {}}}, "tools"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "bad name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    "other type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "parameters a list": (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": [1]}}]},
        "tools[0].function.parameters",
    ),
    "choice not offered": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
    ),
    "choice without tools": (
        {"tool_choice": {"type": "function", "function": {"name": "ls"}}},
        "tool_choice",
    ),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "choice empty": ({"tools": [TOOL], "tool_choice": {}}, "tool_choice"),
    "choice unknown": ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    "format unknown": ({"response_format": {"type": "xml"}}, "response_format"),
    "format a string": ({"response_format": "json"}, "response_format"),
    "schema absent": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
}


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS.values(), ids=BAD_TOOLS.keys())
def test_wrong_tools_and_formats_are_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("invalid_request", param)


def test_a_forced_tool_and_a_schema_are_taken() -> None:
    forced = {"type": "function", "function": {"name": "ls"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    assert checked(tools=[TOOL], tool_choice=forced, response_format=schema).max_tokens == 0


BAD_JSON: dict[str, tuple[bytes, str | None]] = {
    "empty": (b"", None),
    "cut": (b'{"model": "m", "messages": [', None),
    "a list": (b"[]", None),
    "a string": (b'"hello"', None),
    "not JSON": (b"model=m", None),
    "not UTF-8": (b'{"model": "\xff"}', None),
    "NaN": (b'{"model": "m", "temperature": NaN}', "temperature"),
    "infinity": (b'{"top_p": Infinity}', "top_p"),
    "out of range": (b'{"temperature": 1e999}', "temperature"),
    "half a pair": (b'{"messages": [{"content": "\\ud83d"}]}', "messages"),
    "deep": (b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    "rather deep": (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", None),
}


@pytest.mark.parametrize(("raw", "param"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, param: str | None) -> None:
    with pytest.raises(Rejected) as refused:
        decode_object(raw)
    assert (refused.value.code, refused.value.param) == ("invalid_request", param)


def test_whole_pairs_and_deep_schemas_are_taken() -> None:
    assert decode_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert decode_object(b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}")


def completion(prompt: Any) -> CheckedCall:
    raw = json.dumps({"model": "m", "prompt": prompt}).encode()
    return check("completions", decode_object(raw), raw)


def test_a_prompt_is_one_string() -> None:
    assert completion("Hi.").links("")[-1] == completion(["Hi."]).links("")[-1]
    assert json.loads(completion(["Hi."]).raw)["prompt"] == "Hi."
    for bad, code in ((None, "invalid_request"), ("", "invalid_request"), ([], "invalid_request")):
        with pytest.raises(Rejected) as refused:
            completion(bad)
        assert (refused.value.code, refused.value.param) == (code, "prompt")
    for bad in (["a", "b"], [1, 2]):
        with pytest.raises(Rejected) as refused:
            completion(bad)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "prompt")


@pytest.mark.parametrize("model", [None, "", 5, "x" * 201])
def test_the_model_must_be_named(model: Any) -> None:
    assert refusal(model=model).param == "model"
