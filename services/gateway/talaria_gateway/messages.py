"""Form of chat messages as clients write them. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from talaria_common.errors import Rejected

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
MAY_BE_SILENT: Final = frozenset({"assistant", "tool", "function"})
"""Roles whose content may be null or absent."""
NAME_CHARS_MAX: Final = 256

_MEDIA: Final = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "file": "files",
}


def invalid(param: str, fault: str) -> Rejected:
    """A field with a wrong value."""
    return Rejected("invalid_request", f"{param} {fault}", param=param)


def unsupported(param: str) -> Rejected:
    """A field that is known and cannot be honoured."""
    return Rejected("unsupported_parameter", f"{param} is not supported", param=param)


def check_messages(value: Any, messages_max: int) -> list[dict[str, Any]]:
    """The messages, once every one of them has a form that a template can take."""
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list with at least one message")
    if len(value) > messages_max:
        raise invalid("messages", f"must hold at most {messages_max} messages, not {len(value)}")
    for n, message in enumerate(value):
        _check_message(message, f"messages[{n}]")
    return value


def _check_message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise invalid(at, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    _check_content(message.get("content"), role, at)
    name = message.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= NAME_CHARS_MAX):
        raise invalid(f"{at}.name", f"must be a string of at most {NAME_CHARS_MAX} characters")
    if role == "tool":
        tool_call_id = message.get("tool_call_id")
        if not isinstance(tool_call_id, str) or not tool_call_id:
            raise invalid(f"{at}.tool_call_id", "must name the call that this message answers")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise invalid(f"{at}.tool_calls", "must be a list")
    if calls and role != "assistant":
        raise invalid(f"{at}.tool_calls", "belongs to assistant messages only")
    for n, call in enumerate(calls):
        _check_call(call, f"{at}.tool_calls[{n}]")


def _check_content(content: Any, role: str, at: str) -> None:
    if isinstance(content, str) or (content is None and role in MAY_BE_SILENT):
        return
    if not isinstance(content, list):
        raise invalid(f"{at}.content", "must be a string or a list of text parts")
    for n, part in enumerate(content):
        where = f"{at}.content[{n}]"
        if not isinstance(part, dict):
            raise invalid(where, "must be an object with a type")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            raise Rejected(
                "unsupported_parameter",
                f"{where}: {_MEDIA[kind]} are not supported, only text parts are",
                param=f"{where}.type",
            )
        if kind != "text":
            raise invalid(f"{where}.type", "must be 'text'")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}.text", "must be a string")


def _check_call(call: Any, at: str) -> None:
    if not isinstance(call, dict):
        raise invalid(at, "must be an object")
    if call.get("type", "function") != "function":
        raise invalid(f"{at}.type", "must be 'function'")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise invalid(f"{at}.id", "must be a string")
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{at}.function", "must be an object with name and arguments")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{at}.function.name", "must be a string that is not empty")
    arguments = function.get("arguments")
    if arguments and not _is_json_object(arguments):
        raise invalid(f"{at}.function.arguments", "must be a string that holds a JSON object")
    if arguments is not None and not isinstance(arguments, str):
        raise invalid(f"{at}.function.arguments", "must be a string that holds a JSON object")


def _is_json_object(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
