"""The tool-call parser gives the same whatever the pieces, and never loses text."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from talaria_instance.engine.torch.tool_parser import OPEN, ToolCallParser

FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    '{"name": "f", "arguments": ',
    '{"name": "f"',
    '{"arguments": {"x": "y"}, "name": "g"}',
    '{"a": 1}',
    '{"a": "',
    '"',
    "}",
    "{",
    "]",
    "[",
    "\\",
    "<",
    ",",
    "é漢",
    "text",
    "<tool",
    "_call>",
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
objects = st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()), max_size=3)
calls = st.lists(st.tuples(st.text(min_size=1), objects), max_size=3)


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str | None, str]]]:
    numbers = itertools.count()
    parser = ToolCallParser(lambda: f"call_{next(numbers)}")
    text, found = "", dict[int, tuple[str | None, str]]()
    for part in [*map(parser.push, pieces), parser.finish()]:
        text += part.text
        assert len({delta.index for delta in part.tool_calls}) == len(part.tool_calls)
        for delta in part.tool_calls:
            assert (delta.id is not None) == (delta.index not in found)
            name, arguments = found.get(delta.index, (delta.name, ""))
            found[delta.index] = (name, arguments + delta.arguments)
    return text, [found[index] for index in sorted(found)]


@st.composite
def a_split(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return text, [text[i:j] for i, j in itertools.pairwise(cuts)]


@given(a_split())
def test_any_split_gives_the_same(case: tuple[str, list[str]]) -> None:
    text, pieces = case
    assert parsed(pieces) == parsed([text]) == parsed(list(text))


@given(a_split())
def test_text_without_a_call_comes_back_unchanged(case: tuple[str, list[str]]) -> None:
    text, pieces = case
    content, found = parsed(pieces)
    if not found:
        assert content == text


@given(st.text().filter(lambda text: OPEN not in text), calls, st.integers(1, 9))
def test_what_a_template_writes_is_read_back(
    content: str, made: list[tuple[str, dict[str, Any]]], step: int
) -> None:
    written = [(name, json.dumps(arguments)) for name, arguments in made]
    blocks = [
        f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in written
    ]
    text = "\n".join([content, *blocks] if content else blocks)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    assert parsed(pieces) == (content, written)
