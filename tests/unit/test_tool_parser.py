"""Tool calls in Hermes form, out of text that comes in pieces."""

from __future__ import annotations

import itertools

import pytest

from talaria_common.wire import ToolDelta
from talaria_instance.engine.torch.tool_parser import ToolCallParser

CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'


def a_parser() -> ToolCallParser:
    numbers = itertools.count()
    return ToolCallParser(lambda: f"call_{next(numbers)}")


def parsed(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of each call."""
    parser = a_parser()
    text, calls = "", {}
    for part in [*map(parser.push, pieces), parser.finish()]:
        text += part.text
        for delta in part.tool_calls:
            name, arguments = calls.get(delta.index, (delta.name, ""))
            calls[delta.index] = (name, arguments + delta.arguments)
    return text, [calls[index] for index in sorted(calls)]


WHOLE = {
    "plain text": ("Hello.", ("Hello.", [])),
    "one call": (CALL, ("", [("ls", '{"path": "/"}')])),
    "text before": (f"Let me look.\n{CALL}", ("Let me look.", [("ls", '{"path": "/"}')])),
    "text after": (f"{CALL} Done.", (" Done.", [("ls", '{"path": "/"}')])),
    "two calls": (f"{CALL}\n{CALL}", ("", [("ls", '{"path": "/"}')] * 2)),
    "no end marker": (
        '<tool_call>\n{"name": "f", "arguments": {}}',
        ("", [("f", "{}")]),
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    "arguments as a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    "the end marker inside a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        ("", [("f", '{"a": "</tool_call>"}')]),
    ),
    "the end marker inside a string, arguments first": (
        '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call>',
        ("", [("f", '{"a": "</tool_call>"}')]),
    ),
    "braces and quotes inside strings": (
        '<tool_call>{"name": "f", "arguments": {"a": "}\\"]{"}}</tool_call>',
        ("", [("f", '{"a": "}\\"]{"}')]),
    ),
    "broken arguments end at the marker": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Oh.',
        (" Oh.", [("f", '{"a": 1')]),
    ),
    "an open string ends at a marker on its own line": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\n</tool_call>',
        ("", [("f", '{"a": "x')]),
    ),
    "cut within the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        ("", [("f", '{"a": "x')]),
    ),
}


@pytest.mark.parametrize(("text", "expected"), WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_taken_out_of_the_text(
    text: str, expected: tuple[str, list[tuple[str, str]]], step: int
) -> None:
    assert parsed(*(text[i : i + step] for i in range(0, len(text), step))) == expected


BROKEN = {
    "no JSON": "Use <tool_call> tags.",
    "not an object": "<tool_call>[1]</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "a name that is no string": '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    "bad JSON": '<tool_call>{name: "f"}</tool_call>',
    "more than the object": '<tool_call>{"name": "f"} and so on</tool_call>',
    "empty": "a\n<tool_call></tool_call>",
    "cut within the head": 'a\n<tool_call>\n{"name": "f", "argu',
    "cut within the marker": "a\n<tool_ca",
    "end marker alone": "a </tool_call> b",
    "white space at the end": "a \n\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("step", [1, 1000])
def test_what_is_no_call_stays_text_and_nothing_is_lost(text: str, step: int) -> None:
    assert parsed(*(text[i : i + step] for i in range(0, len(text), step))) == (text, [])


def test_text_streams_and_only_a_possible_marker_is_held_back() -> None:
    parser = a_parser()
    assert parser.push("Hello <").text == "Hello "
    assert parser.push("b> there").text == "<b> there"


def test_id_and_name_come_first_and_arguments_as_they_are_written() -> None:
    parser = a_parser()
    assert parser.push('<tool_call>\n{"name": "ls", "arguments":').tool_calls == ()
    first = parser.push(' {"pa').tool_calls
    assert first == (ToolDelta(index=0, id="call_0", name="ls", arguments='{"pa'),)
    assert parser.push('th": "/"').tool_calls == (ToolDelta(index=0, arguments='th": "/"'),)
    assert parser.calls_whole == 0
    assert parser.push("}}\n</tool_call>").tool_calls == (ToolDelta(index=0, arguments="}"),)
    assert parser.calls_whole == 1


def test_each_call_has_its_own_index_and_id() -> None:
    deltas = a_parser().push(f"{CALL}\n{CALL}").tool_calls
    assert [(delta.index, delta.id) for delta in deltas] == [(0, "call_0"), (1, "call_1")]
