"""Reading one streamed chat completion. IO (reads a response)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import httpx
import msgspec

RETRY_DEFAULT_S: Final = 1.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer, on the reader's clock."""

    first_token_s: float
    ended_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error status, an error event in the stream, or no answer at all (status 0)."""

    status: int
    code: str
    text: str
    retry_after_s: float = RETRY_DEFAULT_S


async def read_answer(response: httpx.Response, now_s: Callable[[], float]) -> Answer | ErrorAnswer:
    """Read an SSE response to its end. Raises httpx errors."""
    if response.status_code != 200:
        return _error(response.status_code, await response.aread(), response.headers)
    first_s: float | None = None
    last_s = 0.0
    usage: dict[str, Any] = {}
    is_finished = is_done = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            is_done = True
            break
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            return ErrorAnswer(status=200, code="bad_event", text=f"{error}: {data[:200]}")
        if "error" in event:
            return _error_event(event["error"])
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            has_output = bool(delta.get("content") or delta.get("tool_calls"))
            is_finished = is_finished or bool(choice.get("finish_reason"))
            if has_output or choice.get("finish_reason"):
                last_s = now_s()
                first_s = last_s if first_s is None else first_s
        usage = event.get("usage") or usage
    if first_s is None or not is_finished or not is_done:
        return ErrorAnswer(
            status=200, code="cut_off", text="the stream ended before its last event"
        )
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        first_token_s=first_s,
        ended_s=last_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
    )


def _error(status: int, content: bytes, headers: httpx.Headers) -> ErrorAnswer:
    try:
        retry_after_s = max(0.05, float(headers.get("retry-after", RETRY_DEFAULT_S)))
    except ValueError:
        retry_after_s = RETRY_DEFAULT_S
    try:
        error = msgspec.json.decode(content)["error"]
        code, text = str(error.get("code")), str(error.get("message"))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code, text = "unknown", content[:200].decode(errors="replace")
    return ErrorAnswer(status=status, code=code, text=text, retry_after_s=retry_after_s)


def _error_event(error: Any) -> ErrorAnswer:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    return ErrorAnswer(
        status=200, code=str(fields.get("code")), text=str(fields.get("message", ""))
    )
