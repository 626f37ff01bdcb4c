"""Masks of constrained output: what may come next, and when it is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from talaria_common.errors import Rejected
from talaria_instance.engine.torch.constraint import Mask
from talaria_instance.engine.torch.text import ModelText, OutputText, Piece
from tests.unit.text_models import END, PADDED_VOCAB, byte_model, fed, prompt, text_of, tokens_of

CJK = "多字节字符必须完整。日本語もそのまま。한국어도"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelText:
    return byte_model(folder)


def allowed(mask: Mask | None) -> list[int]:
    assert mask is not None
    assert mask.dtype == np.uint32
    assert mask.shape == ((PADDED_VOCAB + 31) // 32,)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def generated(output: OutputText, tokens_max: int = 300) -> tuple[tuple[int, ...], list[Piece]]:
    """Always the last allowed token, until the grammar ends."""
    tokens: list[int] = []
    pieces: list[Piece] = []
    while len(tokens) < tokens_max:
        tokens.append(allowed(output.allowed_mask())[-1])
        pieces.append(output.push(tokens[-1]))
        if pieces[-1].is_stopped:
            break
    return tuple(tokens), pieces


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def a_tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": an_object(**properties)},
    }


def test_free_output_has_no_mask(model: ModelText) -> None:
    for form in (None, {"type": "text"}):
        assert model.output(prompt(model, response_format=form)).allowed_mask() is None


def test_an_enum_is_spelled_exactly_and_ends_the_output(model: ModelText) -> None:
    form = json_schema(an_object(v={"enum": [CJK]}))
    output = model.output(prompt(model, response_format=form))
    _, pieces = generated(output)
    assert "".join(piece.text for piece in pieces) == f'{{"v": "{CJK}"}}'
    assert [piece.is_stopped for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert output.finish() == Piece()
    assert not output.has_tool_calls


def test_padding_and_special_tokens_are_never_allowed(model: ModelText) -> None:
    output = model.output(prompt(model, response_format={"type": "json_object"}))
    for token in tokens_of('{"', model):
        output.push(token)
    inside = allowed(output.allowed_mask())
    assert len(inside) > 90
    assert min(inside) > END
    assert max(inside) < 259


def test_the_end_token_is_allowed_only_where_the_text_may_end(model: ModelText) -> None:
    output = model.output(prompt(model, response_format=json_schema({"type": "integer"})))
    assert END not in allowed(output.allowed_mask())
    (digit,) = tokens_of("7", model)
    assert not output.push(digit).is_stopped
    assert END in allowed(output.allowed_mask())
    assert output.push(END) == Piece(is_stopped=True)


def test_the_end_of_the_grammar_wins_over_ignore_eos_and_min_tokens(model: ModelText) -> None:
    asked = {"ignore_eos": True, "min_tokens": 50, "max_tokens": 100}
    form = json_schema(an_object(v={"enum": ["a"]}))
    tokens, pieces = generated(model.output(prompt(model, response_format=form, **asked)))
    assert pieces[-1].is_stopped
    assert len(tokens) == len('{"v": "a"}')


def test_a_cut_output_is_not_stopped(model: ModelText) -> None:
    form = json_schema(an_object(v={"enum": ["abc"]}))
    output = model.output(prompt(model, response_format=form))
    assert not any(piece.is_stopped for piece in fed(output, tokens_of('{"v": "a', model)))


@pytest.mark.parametrize(("kind", "start"), [("integer", ""), ("number", ""), ("number", "1.")])
def test_digits_do_not_go_on_for_ever(model: ModelText, kind: str, start: str) -> None:
    form = json_schema(an_object(n={"type": kind}))
    output = model.output(prompt(model, response_format=form))
    for token in tokens_of('{"n": ' + start, model):
        output.push(token)
    (one,) = tokens_of("1", model)
    digits = 0
    while one in allowed(output.allowed_mask()):
        output.push(one)
        digits += 1
    assert 5 < digits <= 16


def test_a_forced_call_has_arguments_that_fit(model: ModelText, folder: Path) -> None:
    body = {
        "tools": [a_tool("other"), a_tool("bash", command={"enum": ["ls -la"]})],
        "tool_choice": {"type": "function", "function": {"name": "bash"}},
    }
    made = prompt(model, **body)
    assert text_of(made.tokens, folder).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments":'
    )
    output = model.output(made)
    _, pieces = generated(output)
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    assert deltas[0].name == "bash"
    assert (deltas[0].id or "").startswith("call_")
    assert [delta.id for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"command": "ls -la"}
    assert "".join(piece.text for piece in pieces) == ""
    assert output.has_tool_calls
    assert pieces[-1].is_stopped


def test_a_required_call_is_one_of_the_tools(model: ModelText) -> None:
    tools = [a_tool("first", a={"enum": ["x"]}), a_tool("second", b={"enum": ["y"]})]
    output = model.output(prompt(model, tools=tools, tool_choice="required"))
    for token in tokens_of('\n{"name": "s', model):
        output.push(token)
    _, pieces = generated(output)
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    assert deltas[0].name == "second"
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"b": "y"}


def test_schemas_keep_their_own_references(model: ModelText) -> None:
    schema = an_object(c={"$ref": "#/$defs/c"}) | {"$defs": {"c": {"enum": ["z"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    _, pieces = generated(model.output(prompt(model, tools=[tool], tool_choice="required")))
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"c": "z"}


def test_a_reply_has_the_tokens_that_it_has_in_the_next_prompt(model: ModelText) -> None:
    tools = [a_tool("bash", command={"enum": ["ls -la"]})]
    made = prompt(model, tools=tools, tool_choice="required")
    tokens, pieces = generated(model.output(made))
    call = {
        "id": "c",
        "type": "function",
        "function": {
            "name": "bash",
            "arguments": "".join(d.arguments for piece in pieces for d in piece.tool_calls),
        },
    }
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "bin"},
    ]
    history = prompt(model, messages=messages, tools=tools).tokens
    assert history[: len(made.tokens) + len(tokens)] == made.tokens + tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": (
        {"response_format": json_schema(an_object(a={"type": "no-such-type"}))},
        "response_format",
    ),
    "a keyword that cannot be followed": (
        {"response_format": json_schema({"not": {"type": "string"}})},
        "response_format",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "an unknown form": ({"response_format": {"type": "xml"}}, "response_format"),
    "a tool that is not offered": (
        {
            "tools": [a_tool("f")],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice",
    ),
    "a call without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a tool's broken schema": (
        {"tools": [a_tool("f", a={"type": "no-such-type"})], "tool_choice": "required"},
        "tools",
    ),
}


@pytest.mark.parametrize(("body", "param"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(
    model: ModelText, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(Rejected) as refusal:
        prompt(model, **body)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", param)
