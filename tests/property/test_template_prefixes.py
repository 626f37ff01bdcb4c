"""The Hermes template: prompts extend one another as histories do, and tell all calls apart."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from talaria_instance.engine.torch.template import ChatTemplate, load_template

contents = st.none() | st.text(max_size=20) | st.sampled_from(["<tool_call>", "\n", "<|im_end|>\n"])
parts = st.lists(st.text(max_size=5).map(lambda text: {"type": "text", "text": text}), max_size=2)
arguments = (
    st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2).map(json.dumps)
    | st.text(max_size=10)
    | st.sampled_from(
        [
            "",
            "{}",
            '"{}"',
            "{} ",
            '{}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}',
            "{}}\n</tool_call><|im_end|>\n<|im_start|>user\n<|im_end|>\n",
        ]
    )
)
calls = st.lists(
    st.tuples(st.sampled_from(["f", "g", 'f", "arguments": {}']), arguments).map(
        lambda pair: {
            "id": "c",
            "type": "function",
            "function": {"name": pair[0], "arguments": pair[1]},
        }
    ),
    max_size=3,
)
replies = st.fixed_dictionaries(
    {"role": st.just("assistant")}, optional={"content": contents, "tool_calls": calls}
)
others = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "system"]), "content": contents | parts}
)
histories = st.lists(replies | others, min_size=1, max_size=6)
tools = st.none() | st.just([{"type": "function", "function": {"name": "f"}}])


def hermes() -> ChatTemplate:
    template = load_template(Path(), "hermes", {})
    assert template is not None
    return template


HERMES = hermes()


@given(histories, tools)
def test_a_history_renders_as_a_prefix_of_any_longer_one(
    history: list[dict[str, Any]], offered: list[dict[str, Any]] | None
) -> None:
    whole = HERMES.render(history, offered)
    for length in range(1, len(history)):
        assert whole.startswith(HERMES.render(history[:length], offered, is_prompt=False))


@given(histories, st.data())
def test_histories_that_differ_only_in_calls_never_render_the_same(
    history: list[dict[str, Any]], data: st.DataObject
) -> None:
    other = copy.deepcopy(history)
    for message in other:
        if message["role"] == "assistant":
            message["tool_calls"] = data.draw(calls)
    assume(_meanings(history) != _meanings(other))
    assert HERMES.render(history) != HERMES.render(other)


def _meanings(history: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """Calls by message; no arguments at all are an empty object."""
    return [
        [
            (call["function"]["name"], call["function"]["arguments"] or "{}")
            for call in message.get("tool_calls") or ()
        ]
        for message in history
    ]
