"""Whose call it is: session, parent, tenant and request id from headers and body. Pure.

The first source that is there wins: our headers, headers native to known clients, known fields
of the body, else the message chain (resolved by admission). Names of headers are compared in any
case, with `-` and `_` alike. Ids are 1-256 printable characters, compared whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from talaria_common.errors import Rejected
from talaria_common.wire import SessionSource

ID_CHARS_MAX: Final = 256
REQUEST_ID_CHARS_MAX: Final = 128

SESSION_HEADERS: Final = ("x-talaria-session-id", "x-dynamo-session-id", "x-session-id")
NATIVE_HEADERS: Final = (
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-litellm-session-id",
    "x-litellm-trace-id",
    "x-smg-routing-key",
)
PARENT_HEADERS: Final = (
    "x-talaria-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-parent-session-id",
)
NATIVE_PARENT_HEADERS: Final = ("x-claude-code-parent-agent-id",)
FINAL_HEADER: Final = "x-talaria-session-final"
TENANT_HEADER: Final = "x-tenant-id"
REQUEST_ID_HEADER: Final = "x-request-id"

BODY_FIELDS: Final = (
    ("session_id",),
    ("nvext", "agent_context", "session_id"),
    ("nvext", "session_control", "session_id"),
    ("conversation",),
    ("conversation", "id"),
    ("conversation_id",),
    ("metadata", "session_id"),
    ("metadata", "user_id", "session_id"),
    ("prompt_cache_key",),
)
"""Paths, in order; a string on the way is read as JSON."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a call says about itself; `session` None: derived from its message chain."""

    session: str | None = None
    source: SessionSource = "derived"
    parent: str | None = None
    is_final: bool = False
    ignored: int = 0
    """Ids in foreign headers or fields that were there but not usable."""


def normalised(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name with dashes; of two spellings of a name the first wins."""
    out: dict[str, str] = {}
    for name, value in headers:
        out.setdefault(name.lower().replace("_", "-"), value.strip())
    return out


def is_id(value: Any) -> bool:
    """`value` can be an id: a string of 1-256 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= ID_CHARS_MAX and value.isprintable()


def tenant(headers: Mapping[str, str]) -> str:
    """A short hash of the API key, else X-Tenant-ID, else the empty tenant. Raises Rejected."""
    key = headers.get("authorization", "").removeprefix("Bearer ").strip()
    key = key or headers.get("x-api-key", "")
    if key:
        return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]
    return _own(headers, (TENANT_HEADER,)) or ""


def request_id(headers: Mapping[str, str]) -> str | None:
    """The caller's X-Request-ID if it is short and printable ASCII."""
    given = headers.get(REQUEST_ID_HEADER, "")
    is_fit = 0 < len(given) <= REQUEST_ID_CHARS_MAX and given.isascii() and given.isprintable()
    return given if is_fit else None


def from_headers(headers: Mapping[str, str]) -> Identity:
    """Session, parent and end as the headers have them; raises Rejected for a bad id of ours."""
    session = _own(headers, SESSION_HEADERS)
    source: SessionSource = "header" if session else "derived"
    ignored = 0
    if session is None:
        session, ignored = _first_usable(headers.get(name) for name in NATIVE_HEADERS)
        source = "native" if session else "derived"
    parent = _own(headers, PARENT_HEADERS)
    if parent is None:
        parent, more = _first_usable(headers.get(name) for name in NATIVE_PARENT_HEADERS)
        ignored += more
    return Identity(
        session=session,
        source=source,
        parent=parent if parent != session else None,
        is_final=headers.get(FINAL_HEADER, "").lower() in {"true", "1"},
        ignored=ignored,
    )


def resolve(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    session_of_answer: Callable[[str], str | None] = lambda answer: None,
) -> Identity:
    """The identity of a call; `session_of_answer` knows the sessions of earlier answers by id."""
    found = from_headers(headers)
    if found.session is not None:
        return found
    session, ignored = _first_usable(_at(body, path) for path in BODY_FIELDS)
    previous = body.get("previous_response_id")
    if session is None and isinstance(previous, str):
        session = session_of_answer(previous)
    return Identity(
        session=session,
        source="body" if session else "derived",
        parent=found.parent if found.parent != session else None,
        is_final=found.is_final,
        ignored=found.ignored + ignored,
    )


def _own(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The first of our own headers that is there; a bad value is the caller's error."""
    for name in names:
        value = headers.get(name)
        if value is None:
            continue
        if not is_id(value):
            shown = "-".join(part.capitalize() for part in name.split("-")).replace("-Id", "-ID")
            raise Rejected(
                "invalid_request",
                f"{shown} must have 1 to {ID_CHARS_MAX} printable characters",
                param=shown,
            )
        return value
    return None


def _first_usable(values: Iterable[Any]) -> tuple[str | None, int]:
    """The first value that can be an id, and how many bad ones came before it."""
    ignored = 0
    for value in values:
        if is_id(value):
            return value, ignored
        if value is not None and not isinstance(value, dict):
            ignored += 1
    return None, ignored


def _at(body: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of keys, or None; a string on the way is read as JSON."""
    value = body
    for key in path:
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):
                return None
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
