"""Bodies of planned calls: recorded messages, or synthetic ones of the planned sizes. Pure.

Synthetic prompts look like an agent's: a system message that all sessions share, the task, then
assistant messages with one tool call each and their results, so that each prompt extends the one
before. The assistant messages are planned, not the engine's answers: bodies are the same whoever
serves them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from talaria_sim.workload import CallPlan, SessionPlan

# Each word is one token, with the space before it, in SmolLM2's vocabulary (and in most others).
_WORDS: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also did many "
    "off before must well back through years much where your way down should because long each just "
    "state people those too world own make good how work here life both between being under never "
    "day same another know while last might great old year since against go came right used take "
    "three file test line code name value class type list error data model path call return true "
    "set get run find read write open close start end size count index table field object method"
)

WORDS: Final = tuple(_WORDS.split())

# Tokens that the Hermes-style template adds, counted with SmolLM2's tokenizer.
MESSAGE_TOKENS: Final = 5
CALL_TOKENS: Final = 32
"""A tool call in an assistant message, its three-word command included."""
RESULT_TOKENS: Final = 17
"""A tool message, its role included."""
TOOLS_TOKENS: Final = 160
"""The declaration of one tool."""
CUE_TOKENS: Final = 3
"""What asks the assistant to speak, at the end of each prompt."""

BASH: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def bodies(session: SessionPlan, model: str, seed: int) -> list[dict[str, Any]]:
    """The JSON body of each call of a session, in order; deterministic.

    Lengths are forced: `ignore_eos` with `max_tokens` as planned, greedy.
    """
    prompts = _recorded(session) if session.messages else _synthetic(session, seed)
    tools = list(session.tools) if session.messages else [BASH]
    return [
        {
            "model": model,
            "messages": messages,
            **({"tools": tools} if tools else {}),
            "max_tokens": call.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for call, messages in zip(session.calls, prompts, strict=True)
    ]


def _recorded(session: SessionPlan) -> list[list[Mapping[str, Any]]]:
    return [list(session.messages[: call.request_messages]) for call in session.calls]


def _synthetic(session: SessionPlan, seed: int) -> list[list[Mapping[str, Any]]]:
    rng = random.Random(f"{seed}/{session.id}/text")
    prompts: list[list[Mapping[str, Any]]] = []
    history: list[tuple[Mapping[str, Any], int]] = []  # message, prompt tokens up to its end
    before: CallPlan | None = None
    for n, call in enumerate(session.calls):
        if before is None:
            history = _opening(session, call, seed)
        elif session.extends(n):
            history = history + _turn(n, before, call.prompt_tokens - history[-1][1], history, rng)
        else:
            history = _rewritten(call, history, rng)
        prompts.append([message for message, _ in history])
        before = call
    return prompts


def _opening(
    session: SessionPlan, call: CallPlan, seed: int
) -> list[tuple[Mapping[str, Any], int]]:
    shared = random.Random(f"{seed}/opening")
    system_tokens = max(call.shared_tokens, TOOLS_TOKENS + 2 * MESSAGE_TOKENS)
    system = _words(system_tokens - TOOLS_TOKENS - MESSAGE_TOKENS, shared)
    task = _words(
        call.prompt_tokens - system_tokens - MESSAGE_TOKENS - CUE_TOKENS,
        random.Random(f"{seed}/{session.task}"),
    )
    return [
        ({"role": "system", "content": system}, system_tokens),
        ({"role": "user", "content": task}, max(call.prompt_tokens, system_tokens)),
    ]


def _turn(
    n: int,
    before: CallPlan,
    growth: int,
    history: list[tuple[Mapping[str, Any], int]],
    rng: random.Random,
) -> list[tuple[Mapping[str, Any], int]]:
    """The planned reply to the call before, and the tool's result."""
    start = history[-1][1]
    said = max(0, before.output_tokens - CALL_TOKENS)
    reply_tokens = said + CALL_TOKENS + MESSAGE_TOKENS
    call_id = f"call_{n:04d}"
    command = _words(3, rng)
    reply = {
        "role": "assistant",
        "content": _words(said, rng) if said else None,
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": "bash", "arguments": f'{{"command": "{command}"}}'},
            }
        ],
    }
    words = max(1, growth - reply_tokens - RESULT_TOKENS)
    result = {"role": "tool", "tool_call_id": call_id, "content": _words(words, rng)}
    middle = start + reply_tokens
    return [(reply, middle), (result, middle + RESULT_TOKENS + words)]


def _rewritten(
    call: CallPlan, history: list[tuple[Mapping[str, Any], int]], rng: random.Random
) -> list[tuple[Mapping[str, Any], int]]:
    """A prompt that leaves its history: what is shared stays, the rest is new text of the user's."""
    kept = [entry for n, entry in enumerate(history) if n == 0 or entry[1] <= call.shared_tokens]
    words = max(1, call.prompt_tokens - kept[-1][1] - MESSAGE_TOKENS)
    summary = {"role": "user", "content": _words(words, rng)}
    return [*kept, (summary, kept[-1][1] + MESSAGE_TOKENS + words)]


def _words(n: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=max(1, n)))
