"""Asking a running stack over HTTP. IO."""

from __future__ import annotations

from typing import Any, Final

import httpx

from talaria_cli.failure import CommandFailed

DEFAULT_URL: Final = "http://127.0.0.1:8080"


def client(url: str, timeout_s: float = 10.0) -> httpx.Client:
    """An HTTP client of the stack at `url`; proxies of the environment are not for it."""
    return httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)


def get(http: httpx.Client, path: str) -> Any:
    """A JSON document. Raises `CommandFailed` with what to do."""
    try:
        answer = http.get(path)
    except httpx.HTTPError as error:
        raise CommandFailed(unreachable(http, error)) from error
    if answer.status_code != 200:
        raise CommandFailed(error_text(answer.status_code, answer.content))
    try:
        return answer.json()
    except ValueError as error:
        raise CommandFailed(f"{http.base_url}{path} does not answer with JSON") from error


def unreachable(http: httpx.Client, error: httpx.HTTPError) -> str:
    """Why nothing answers, and what to do."""
    reason = str(error) or type(error).__name__
    return f"no stack answers at {http.base_url} ({reason}); start one with `talaria up`"


def error_text(status: int, content: bytes) -> str:
    """The message of an OpenAI-style error, else the start of the body."""
    try:
        error = httpx.Response(status, content=content).json()["error"]
        return f"{error['message']} ({error.get('code') or status})"
    except (ValueError, KeyError, TypeError):
        return f"status {status}: {content[:200].decode(errors='replace')}"
