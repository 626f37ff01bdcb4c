"""A caller's JSON schema as a grammar can follow it to an end. Pure.

A grammar lets digits go on for ever, and a small model that repeats itself takes the offer. Where
a schema says nothing of a number's size, it gets the range in which JSON numbers mean the same to
every reader (RFC 8259, section 6), and nine decimals. A `format` that no one defined is a remark,
as JSON Schema says, and goes. What fits the result fits the caller's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

INTEGER_MAX: Final = 2**53 - 1
SMALLEST_STEP: Final = 1e-9

_FORMATS: Final = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "int32",
        "int64",
        "float",
        "double",
    ]
)
"""What llguidance knows; any other makes it refuse the schema."""
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_SCHEMAS: Final = frozenset(
    [
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "if",
        "then",
        "else",
        "not",
    ]
)
"""Keywords whose value is a schema."""
_LISTS: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_TABLES: Final = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)


def workable(schema: Any) -> Any:
    """`schema` with bounds on the numbers that have none; the original is left alone."""
    if not isinstance(schema, dict):
        return schema
    inner = {key: _inside(key, value) for key, value in schema.items()}
    if isinstance(form := inner.get("format"), str) and form not in _FORMATS:
        del inner["format"]
    return inner | _bounds(schema)


def _inside(key: str, value: Any) -> Any:
    if key in _TABLES and isinstance(value, dict):
        return {name: workable(entry) for name, entry in value.items()}
    if isinstance(value, list) and (key in _LISTS or key == "items"):
        return [workable(entry) for entry in value]
    return workable(value) if key in _SCHEMAS else value


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    stated = schema.get("type")
    types = set(stated) if isinstance(stated, list) else {stated}
    if not types & {"integer", "number"} or schema.keys() & {"enum", "const"}:
        return {}
    given = [schema[key] for key in (*_LOWER, *_UPPER) if key in schema]
    if not all(isinstance(limit, int | float) and abs(limit) <= INTEGER_MAX for limit in given):
        return {}  # whoever asks for larger numbers knows why
    bounds: dict[str, Any] = {}
    if not schema.keys() & set(_LOWER):
        bounds["minimum"] = -INTEGER_MAX
    if not schema.keys() & set(_UPPER):
        bounds["maximum"] = INTEGER_MAX
    if "number" in types and "multipleOf" not in schema:
        bounds["multipleOf"] = SMALLEST_STEP
    return bounds
