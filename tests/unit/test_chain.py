"""Message chains name prompts: equal where the prompt is, different where it could differ."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_common import chain

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
CALL = {"id": "x1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
SYSTEM = {"role": "system", "content": "You are."}
USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}


def digests(messages: list[dict[str, Any]], start: bytes | None = None) -> list[bytes]:
    root = chain.root("t", "m", None) if start is None else start
    return [link.digest for link in chain.links(root, messages)]


def test_a_longer_history_keeps_the_links_of_its_beginning() -> None:
    short = digests([SYSTEM, USER])
    long = digests([SYSTEM, USER, REPLY, {"role": "user", "content": "More"}])
    assert long[:2] == short
    assert len(set(long)) == 4


def test_a_change_in_the_middle_changes_all_that_follows() -> None:
    one = digests([SYSTEM, USER, REPLY])
    two = digests([SYSTEM, {"role": "user", "content": "Ho"}, REPLY])
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert one[2] != two[2]


def test_links_tell_size_and_role() -> None:
    links = chain.links(chain.root("t", "m", None), [SYSTEM, USER, REPLY])
    sizes = [len(chain.canonical_message(message)) for message in (SYSTEM, USER, REPLY)]
    assert [link.end_bytes for link in links] == [sum(sizes[: n + 1]) for n in range(3)]
    assert [link.is_reply for link in links] == [False, False, True]


def test_extend_is_one_more_link() -> None:
    root = chain.root("t", "m", None)
    assert chain.extend(root, SYSTEM) == digests([SYSTEM])[0]
    assert chain.extend(digests([SYSTEM])[0], USER) == digests([SYSTEM, USER])[1]


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null content": ({"role": "assistant", "content": None}, {"role": "assistant"}),
    "empty content": ({"role": "user", "content": ""}, {"role": "user", "content": None}),
    "no tool calls": (REPLY | {"tool_calls": []}, REPLY | {"tool_calls": None}),
    "parts of text": (
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        USER,
    ),
    "id of a tool call": (
        REPLY | {"tool_calls": [CALL]},
        REPLY | {"tool_calls": [CALL | {"id": "x2"}]},
    ),
    "order of fields": (dict(reversed(USER.items())), USER),
}


@pytest.mark.parametrize("case", SAME)
def test_histories_that_render_alike_share_links(case: str) -> None:
    one, two = SAME[case]
    assert digests([one]) == digests([two])


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "role": (USER, USER | {"role": "system"}),
    "content": (USER, USER | {"content": "hi"}),
    "tool call": (REPLY, REPLY | {"tool_calls": [CALL]}),
    "arguments": (
        REPLY | {"tool_calls": [CALL]},
        REPLY | {"tool_calls": [CALL | {"function": {"name": "ls", "arguments": '{"a":1}'}}]},
    ),
    "name": (USER, USER | {"name": "ann"}),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_histories_that_render_differently_do_not(case: str) -> None:
    one, two = DIFFERENT[case]
    assert digests([one]) != digests([two])


def test_tenant_model_tools_and_options_salt_the_root() -> None:
    roots = [
        chain.root("t", "m", None),
        chain.root("u", "m", None),
        chain.root("t", "n", None),
        chain.root("t", "m", [TOOL]),
        chain.root("t", "m", None, {"enable_thinking": True}),
    ]
    assert len(set(roots)) == len(roots)
    assert chain.root("t", "m", []) == chain.root("t", "m", None, {})
    assert chain.root("t", "m", [dict(reversed(TOOL.items()))]) == chain.root("t", "m", [TOOL])


def test_lines_that_change_with_every_call_are_left_out() -> None:
    text = "x-anthropic-billing-header: cc=1; n=7\nYou are.\n"
    assert chain.without_volatile_lines(text) == "You are.\n"
    assert chain.without_volatile_lines("a\n" + text) == "a\nYou are.\n"
    assert chain.without_volatile_lines("You are.") == "You are."
