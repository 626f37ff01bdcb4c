"""Form of tools, tool_choice and response_format. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from talaria_gateway.messages import invalid

TOOLS_MAX: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORMATS: Final = ("text", "json_object", "json_schema")


def check_tools(body: Mapping[str, Any]) -> None:
    """Raise Rejected unless `tools` can be offered and `tool_choice` can be followed."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise invalid("tools", "must be a list")
    if len(tools or ()) > TOOLS_MAX:
        raise invalid("tools", f"must hold at most {TOOLS_MAX} tools")
    names = {_checked_tool(tool, f"tools[{n}]") for n, tool in enumerate(tools or ())}
    choice = body.get("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return
    if choice == "required":
        if not names:
            raise invalid("tool_choice", "is 'required', but no tools are offered")
        return
    if not isinstance(choice, dict):
        raise invalid("tool_choice", "must be none, auto, required or a function to call")
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict):
        raise invalid("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise invalid("tool_choice", "names a function that is not among the tools")


def _checked_tool(tool: Any, at: str) -> str:
    if not isinstance(tool, dict):
        raise invalid(at, "must be an object")
    if tool.get("type") != "function":
        raise invalid(f"{at}.type", "must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{at}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{at}.function.name", "must have 1 to 128 of the characters A-Z a-z 0-9 _ . -"
        )
    if not isinstance(function.get("description"), str | None):
        raise invalid(f"{at}.function.description", "must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise invalid(f"{at}.function.parameters", "must be a JSON schema object")
    return name


def check_response_format(body: Mapping[str, Any]) -> None:
    """Raise Rejected unless `response_format` has a known form; the engine checks the schema itself."""
    value = body.get("response_format")
    if value is None:
        return
    if not isinstance(value, dict) or value.get("type") not in _FORMATS:
        raise invalid("response_format", f"must be an object whose type is one of {_FORMATS}")
    if value["type"] != "json_schema":
        return
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise invalid("response_format.json_schema", "must be an object that holds a schema object")
