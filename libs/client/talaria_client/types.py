"""What the client hands out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from talaria_common.wire import ToolDelta, Usage

FinishReason = Literal["stop", "length", "tool_calls"]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer; the last one has `finish_reason` and `usage`, and may have no text."""

    text: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    tokens: int = 0
    """Tokens in this piece."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    call_id: str = ""
    session: str = ""
    instance: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tool call; `arguments` is the JSON that the model wrote."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    call_id: str
    session: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the deployment serves."""

    id: str
    max_model_len: int = 0


def joined(pieces: Iterable[ToolDelta]) -> tuple[ToolCall, ...]:
    """Whole tool calls from their pieces, by index."""
    calls: dict[int, dict[str, str]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or piece.id or ""
        call["name"] = call["name"] or piece.name or ""
        call["arguments"] += piece.arguments
    return tuple(ToolCall(**call) for _, call in sorted(calls.items()))
