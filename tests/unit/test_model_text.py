"""From a caller's JSON to tokens, and from tokens to text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from talaria_common.errors import Rejected, Unavailable
from talaria_instance.engine.torch.text import ModelText, Piece, find_stop
from tests.unit.text_models import (
    CONTEXT,
    END,
    PADDED_VOCAB,
    a_request,
    byte_model,
    fed,
    prompt,
    tokens_of,
)

TOOL = {"type": "function", "function": {"name": "ls"}}
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return byte_model(tmp_path_factory.mktemp("model"))


def texts(model: ModelText, written: str, **body: Any) -> list[str]:
    """What each byte of `written` lets out, and the end."""
    output = model.output(prompt(model, **body))
    return [piece.text for piece in fed(output, tokens_of(written, model))]


# --- prompts --------------------------------------------------------------------------------------


def test_special_tokens_of_the_template_are_tokens(model: ModelText) -> None:
    tokens = prompt(model).tokens
    assert tokens[0] == 1
    assert tokens.count(1) == 3
    assert tokens.count(END) == 2


def test_a_prompt_that_fills_the_context_is_refused_with_both_counts(model: ModelText) -> None:
    length = len(prompt(model).tokens)
    with pytest.raises(Rejected, match=rf"length is {length} tokens, but .* has {length} tok") as e:
        model.prepare(a_request(), length)
    assert (e.value.code, e.value.param) == ("context_length_exceeded", "messages")
    assert model.prepare(a_request(), length + 1).sampling.max_tokens == 1


def test_a_hopelessly_long_prompt_is_refused_by_its_beginning(model: ModelText) -> None:
    request = a_request(messages=[{"role": "user", "content": "é" * 1000}])
    with pytest.raises(Rejected, match=r"length is 20 tokens, but your prompt has more than \d+ t"):
        model.prepare(request, 20)


LIMITS = {
    "none stated": ({}, None),
    "max_tokens": ({"max_tokens": 7}, 7),
    "the newer name first": ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
    "more than the context leaves": ({"max_tokens": 10**6}, None),
}


@pytest.mark.parametrize(("body", "expected"), LIMITS.values(), ids=LIMITS)
def test_output_is_limited_to_what_the_context_leaves(
    model: ModelText, body: dict[str, Any], expected: int | None
) -> None:
    made = prompt(model, **body)
    assert made.sampling.max_tokens == (expected or CONTEXT - len(made.tokens))


def test_min_tokens_cannot_exceed_the_limit(model: ModelText) -> None:
    assert prompt(model, max_tokens=3, min_tokens=9).sampling.min_tokens == 3


def test_sampling_defaults_are_openais(model: ModelText) -> None:
    sampling = prompt(model, temperature=None, top_k=-1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1, 1, 0, None)
    assert not sampling.ignore_eos
    assert sampling.stop == ()
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 9, "seed": 3, "stop": "a", "ignore_eos": True}
    sampling = prompt(model, **asked).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 9, 3)
    assert sampling.ignore_eos
    assert sampling.stop == ("a",)


PROMPTS: dict[str, Any] = {"a text": "abc", "a list of one": ["abc"]}


@pytest.mark.parametrize("form", PROMPTS.values(), ids=PROMPTS)
def test_a_completion_has_no_template(model: ModelText, form: Any) -> None:
    made = model.prepare(a_request("completions", prompt=form), CONTEXT)
    assert made.tokens == tokens_of("abc", model)
    assert len(made.tokens) == 3
    assert made.sampling.max_tokens == 16


def test_a_completion_may_be_given_as_tokens(model: ModelText) -> None:
    for form in ([5, 6], [[5, 6]]):
        assert model.prepare(a_request("completions", prompt=form), CONTEXT).tokens == (5, 6)


BAD_PROMPTS: dict[str, Any] = {
    "none": None,
    "empty": "",
    "several": ["a", "b"],
    "no ids": [PADDED_VOCAB],
    "negative ids": [-1],
    "booleans": [True],
}


@pytest.mark.parametrize("form", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_prompt_without_sense_is_refused(model: ModelText, form: Any) -> None:
    with pytest.raises(Rejected) as refusal:
        model.prepare(a_request("completions", prompt=form), CONTEXT)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "prompt")


def test_a_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    model = byte_model(tmp_path, chat_template="")
    with pytest.raises(Rejected, match="no chat template"):
        prompt(model)
    assert tokens_of("a", model)


def test_a_folder_without_a_model_is_our_failure(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"config\.json is missing"):
        ModelText(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Unavailable):
        ModelText(tmp_path)


# --- output ---------------------------------------------------------------------------------------


def test_only_whole_characters_come_out(model: ModelText) -> None:
    assert texts(model, "é漢") == ["", "é", "", "", "漢", ""]


def test_a_character_that_is_cut_is_replaced_at_the_end(model: ModelText) -> None:
    output = model.output(prompt(model))
    assert [p.text for p in fed(output, tokens_of("漢", model)[:2])] == ["", "", "\ufffd"]


def test_special_and_padding_tokens_have_no_text(model: ModelText) -> None:
    output = model.output(prompt(model))
    assert all(piece == Piece() for piece in fed(output, (END, 0, PADDED_VOCAB - 1)))


def test_a_stop_string_ends_the_output_and_is_not_part_of_it(model: ModelText) -> None:
    output = model.output(prompt(model, stop=["\n\n", "STOP"]))
    pieces = fed(output, tokens_of("a\nbSTOPc", model))
    assert "".join(piece.text for piece in pieces) == "a\nb"
    assert [n for n, piece in enumerate(pieces) if piece.is_stopped] == [6, 7]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert find_stop("xabcd", ["abcd", "bc"]) == 2
    assert find_stop("xabcd", ["bcd", "abcd"]) == 1
    assert find_stop("xabcd", ["y"]) is None


def test_the_beginning_of_a_stop_string_is_held_back(model: ModelText) -> None:
    assert texts(model, "aSTb", stop="STOP") == ["a", "", "", "STb", ""]
    assert texts(model, "aST", stop="STOP") == ["a", "", "", "ST"]


def test_stop_strings_count_after_min_tokens(model: ModelText) -> None:
    assert "".join(texts(model, "ab.cd.e", stop=".", min_tokens=3)) == "ab.cd"


def test_calls_are_parsed_only_where_the_caller_allows_them(model: ModelText) -> None:
    assert "".join(texts(model, CALL, tools=[TOOL])) == ""
    assert "".join(texts(model, CALL)) == CALL
    assert "".join(texts(model, CALL, tools=[TOOL], tool_choice="none")) == CALL


def test_the_end_token_keeps_what_is_held_back(model: ModelText) -> None:
    output = model.output(prompt(model, tools=[TOOL], stop="STOP"))
    pieces = fed(output, (*tokens_of("a <tool_caS", model), END))
    assert "".join(piece.text for piece in pieces) == "a <tool_caS"


def test_without_parallel_calls_the_first_one_is_the_last(model: ModelText) -> None:
    body = {"tools": [TOOL], "parallel_tool_calls": False}
    output = model.output(prompt(model, **body))
    pieces = fed(output, tokens_of(f"{CALL}\n{CALL}", model))
    assert sum(len(p.tool_calls) for p in pieces if any(d.id for d in p.tool_calls)) == 1
    assert pieces[len(CALL) - 1].is_stopped


def test_ids_of_calls_are_unique(model: ModelText) -> None:
    ids = set()
    for _ in range(3):
        output = model.output(prompt(model, tools=[TOOL]))
        pieces = fed(output, tokens_of(f"{CALL}\n{CALL}", model))
        ids |= {delta.id for piece in pieces for delta in piece.tool_calls if delta.id}
    assert len(ids) == 6


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = (
        "import sys, talaria_instance.catalog, talaria_instance.engine.torch.text\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
