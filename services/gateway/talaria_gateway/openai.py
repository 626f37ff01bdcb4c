"""OpenAI's wire forms: chunks of a stream, whole answers, errors, the model list. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from talaria_common.errors import TalariaError
from talaria_common.wire import Delta, Ended, Endpoint, ToolDelta, Usage

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_json: Final = msgspec.json.Encoder()
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Frames:
    """Frames one answer, streamed or whole: feed it every delta, then the end."""

    def __init__(
        self,
        endpoint: Endpoint,
        call_id: str,
        model: str,
        created_unix_s: float,
        *,
        with_usage: bool,
    ) -> None:
        self._is_chat = endpoint == "chat"
        self._with_usage = with_usage
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{call_id}"
        self._model = model
        self._created = int(created_unix_s)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = _json.encode(self._head(kind))
        self._chunk_head = b"data: " + head[:-1] + b',"choices":'
        self._has_role = False
        self._text: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    # --- streamed ---------------------------------------------------------------------------------

    def chunks(self, delta: Delta) -> bytes:
        """The events of one delta; the role comes once, ahead of the first."""
        if not self._is_chat:
            return self._text_chunk(delta.text, None) if delta.text else b""
        out = self._role()
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        calls = [_tool_delta(piece) for piece in _joined(delta.tool_calls)]
        if calls:
            content["tool_calls"] = calls
        return out + self._chat_chunk(content, None) if content else out

    def end(self, ended: Ended) -> bytes:
        """The finish, the usage if it was asked for, and the end of the stream."""
        finish = ended.finish_reason or "stop"
        if self._is_chat:
            out = self._role() + self._chat_chunk({}, finish)
        else:
            out = self._text_chunk("", finish)
        if self._with_usage:
            usage = _json.encode(usage_object(ended.usage))
            out += self._chunk_head + b'[],"usage":' + usage + b"}\n\n"
        return out + DONE

    def _role(self) -> bytes:
        if self._has_role:
            return b""
        self._has_role = True
        return self._chat_chunk({"role": "assistant", "content": ""}, None)

    def _chat_chunk(self, delta: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk_head + _json.encode([choice]) + b"}\n\n"

    def _text_chunk(self, text: str, finish: str | None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return self._chunk_head + _json.encode([choice]) + b"}\n\n"

    # --- whole ------------------------------------------------------------------------------------

    def collect(self, delta: Delta) -> None:
        """Keep a delta for the whole answer."""
        if delta.text:
            self._text.append(delta.text)
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, {"id": "", "name": "", "arguments": ""})
            call["id"] = call["id"] or piece.id or ""
            call["name"] = call["name"] or piece.name or ""
            call["arguments"] += piece.arguments

    def whole(self, ended: Ended) -> bytes:
        """The answer of a call that does not stream."""
        text, finish = "".join(self._text), ended.finish_reason or "stop"
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self._is_chat:
            choice["message"] = self._message(text)
        else:
            choice["text"] = text
        kind = "chat.completion" if self._is_chat else "text_completion"
        answer = self._head(kind) | {"choices": [choice], "usage": usage_object(ended.usage)}
        return _json.encode(answer)

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for _, call in sorted(self._calls.items())
            ]
        return message


def _joined(pieces: Iterable[ToolDelta]) -> list[ToolDelta]:
    """One piece per index: clients do not expect an index twice in a chunk."""
    by_index: dict[int, ToolDelta] = {}
    for piece in pieces:
        before = by_index.get(piece.index)
        by_index[piece.index] = (
            piece
            if before is None
            else ToolDelta(
                index=piece.index,
                id=before.id or piece.id,
                name=before.name or piece.name,
                arguments=before.arguments + piece.arguments,
            )
        )
    return list(by_index.values())


def _tool_delta(piece: ToolDelta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": piece.arguments}
    if piece.name is not None:
        function = {"name": piece.name} | function
    out: dict[str, Any] = {"index": piece.index, "function": function}
    return out | {"id": piece.id, "type": "function"} if piece.id is not None else out


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, the cached part of the prompt included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_object(error: TalariaError) -> dict[str, Any]:
    """OpenAI's error object."""
    status = error.http_status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields = {"message": error.detail, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def error_body(error: TalariaError) -> bytes:
    return _json.encode(error_object(error))


def error_event(error: TalariaError) -> bytes:
    """The last event of a stream that failed after its status had gone out."""
    return b"data: " + error_body(error) + b"\n\n"


def retry_after(error: TalariaError) -> str | None:
    """Value of Retry-After in whole seconds, for errors that a retry may help."""
    if error.retry_after_s is None and error.http_status not in (429, 503):
        return None
    return str(max(1, math.ceil(error.retry_after_s or 1.0)))


def model_object(model: str, max_model_len: int, created_unix_s: float) -> dict[str, Any]:
    """One entry of the model list."""
    return {
        "id": model,
        "object": "model",
        "created": int(created_unix_s),
        "owned_by": "talaria",
        "max_model_len": max_model_len,
    }


def model_list(entries: list[dict[str, Any]]) -> bytes:
    return _json.encode({"object": "list", "data": entries})
