"""JSON bodies: bytes to an object, or an error that says what is wrong and where. Pure."""

from __future__ import annotations

import json
import math
from typing import Any, Final

import msgspec

from talaria_common.errors import Rejected

DEPTH_MAX: Final = 100
"""Nesting of objects and lists; a tool's schema has about 10."""


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; raises Rejected `invalid_request`, with the field as param if known."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _diagnosed(raw, str(error)) from error
    if not isinstance(value, dict):
        raise Rejected("invalid_request", f"the body must be a JSON object, not {_kind(value)}")
    _check_depth(value)
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _too_deep() -> Rejected:
    return Rejected("invalid_request", f"the body is nested more than {DEPTH_MAX} levels deep")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, dict | list))
        if not below:
            return
        level = below
    raise _too_deep()


def _diagnosed(raw: bytes, detail: str) -> Rejected:
    """Why strict JSON refused: the lax standard parser takes NaN and lone surrogates."""
    if not raw.strip():
        return Rejected("invalid_request", "the body is empty; it must be a JSON object")
    try:
        value = json.loads(raw)
    except RecursionError:
        return _too_deep()
    except ValueError as error:
        return Rejected("invalid_request", f"the body is not valid JSON: {error}")
    for name, field in value.items() if isinstance(value, dict) else ():
        fault = _fault(field)
        if fault:
            return Rejected("invalid_request", f"{name!r} {fault}", param=str(name)[:200])
    return Rejected("invalid_request", f"the body is not valid JSON: {detail}")


def _fault(field: Any) -> str:
    """What strict JSON does not allow in a field; empty if nothing."""
    stack = [field]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return "must hold finite numbers"
        if isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError:
                return "holds half of a surrogate pair, which is no character"
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return ""
