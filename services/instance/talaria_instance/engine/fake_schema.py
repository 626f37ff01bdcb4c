"""The smallest instance of a JSON schema. Pure.

Errors are ValueError with a text for the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

DEPTH_MAX: Final = 64
_TYPES: Final = frozenset(("object", "array", "string", "integer", "number", "boolean", "null"))
_FORMATS: Final = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "a@example.org",
    "uri": "http://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "hostname": "example.org",
}
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "not", "contains", "if", "then", "else")


def check_schema(schema: Any, *, depth: int = 0) -> None:
    """Raise unless `schema` has the form of a JSON schema in all its parts."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {type(schema).__name__}")
    if depth > DEPTH_MAX:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
    for kind in _types(schema):
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ValueError(f"unknown type {kind!r}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise ValueError("enum must be a list with entries")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError("required must be a list of names")
    for part in _parts(schema):
        check_schema(part, depth=depth + 1)


def instance_of(schema: Any) -> Any:
    """A value that fits a checked schema: first choice, required properties, least sizes."""
    return _instance(schema, schema, 0)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type")
    if kind is None:
        return []
    return kind if isinstance(kind, list) else [kind]


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _MAPS:
        parts = schema.get(key, {})
        if not isinstance(parts, dict):
            raise ValueError(f"{key} must be an object")
        yield from parts.values()
    for key in _LISTS:
        parts = schema.get(key, [])
        if not isinstance(parts, list) or (key in schema and not parts):
            raise ValueError(f"{key} must be a list with entries")
        yield from parts
    yield from (schema[key] for key in _SINGLES if key in schema)


def _instance(schema: Any, root: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError("the schema has no finite instance")
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("nothing fits the schema false")
        return None
    if "$ref" in schema:
        return _instance(_resolve(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            rest = {k: v for k, v in schema.items() if k != key}
            return _instance(_merged([rest, schema[key][0]], root), root, depth + 1)
    if "allOf" in schema:
        rest = {k: v for k, v in schema.items() if k != "allOf"}
        return _instance(_merged([rest, *schema["allOf"]], root), root, depth + 1)
    return _typed(schema, root, depth)


def _typed(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kinds = _types(schema)
    kind = kinds[0] if kinds else _implied_type(schema)
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, depth)
        case "string":
            return _string(schema)
        case "integer" | "number":
            return _number(schema, kind)
        case "boolean":
            return False
        case _:
            return None


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "null"


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    others = schema.get("additionalProperties", True)
    names = [n for n in properties if n in required] + [n for n in required if n not in properties]
    value = {n: _instance(properties.get(n, others), root, depth + 1) for n in names}
    if len(value) < _least(schema, "minProperties"):
        raise ValueError("minProperties above the required properties is not supported")
    return value


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any]:
    first = schema.get("prefixItems", [])
    size = _least(schema, "minItems")
    if size > 1 and schema.get("uniqueItems"):
        raise ValueError("uniqueItems with minItems above 1 is not supported")
    items = [*first[:size], *[schema.get("items", True)] * (size - len(first))]
    return [_instance(item, root, depth + 1) for item in items]


def _string(schema: Mapping[str, Any]) -> str:
    if "pattern" in schema:
        raise ValueError("pattern is not supported")
    return _FORMATS.get(str(schema.get("format")), "").ljust(_least(schema, "minLength"), "x")


def _number(schema: Mapping[str, Any], kind: str) -> int | float:
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"):
        if not isinstance(schema.get(key, 0), int | float) or isinstance(schema.get(key), bool):
            raise ValueError(f"{key} must be a number")
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    step = schema.get("multipleOf", 1)
    if step <= 0:
        raise ValueError("multipleOf must be above 0")
    nearest = 0 if low <= 0 <= high else low if low > 0 else high
    tries = [nearest] if kind == "number" else []
    tries += [(math.ceil(nearest / step) + n) * step for n in (0, 1, -1)]
    for value in tries:
        if _fits(value, schema, kind):
            return value
    raise ValueError("no number was found within the bounds")


def _fits(value: float, schema: Mapping[str, Any], kind: str) -> bool:
    return (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        and schema.get("exclusiveMinimum", -math.inf) < value
        and value < schema.get("exclusiveMaximum", math.inf)
        and value % schema.get("multipleOf", value or 1) == 0
        and (kind == "number" or value == int(value))
    )


def _least(schema: Mapping[str, Any], key: str) -> int:
    least = schema.get(key, 0)
    if type(least) is not int or not 0 <= least <= 10_000:
        raise ValueError(f"{key} must be between 0 and 10000")
    return least


def _resolve(ref: Any, root: Any) -> Any:
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise ValueError(f"$ref {ref!r} does not point into the schema")
    found = root
    for step in ref[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise ValueError(f"$ref {ref!r} points at nothing")
        found = found[name]
    if not isinstance(found, dict | bool):
        raise ValueError(f"$ref {ref!r} points at no schema")
    return found


def _merged(parts: list[Any], root: Any) -> dict[str, Any]:
    """One schema for all `parts`; properties and required names add up."""
    out: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict) and "$ref" in part:
            target = _resolve(part["$ref"], root)
            rest = {k: v for k, v in part.items() if k != "$ref"}
            part = {**target, **rest} if isinstance(target, dict) else target and rest
        if part is False:
            raise ValueError("nothing fits the schema false")
        for key, value in ({} if part is True else part).items():
            if key == "properties":
                out[key] = {**out.get(key, {}), **value}
            elif key == "required":
                out[key] = [*out.get(key, []), *(n for n in value if n not in out.get(key, []))]
            else:
                out[key] = value
    return out
