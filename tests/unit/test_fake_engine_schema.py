"""The smallest instance of a schema, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_instance.engine.fake_schema import check_schema, instance_of

CASES: dict[str, tuple[Any, Any]] = {
    "enum takes the first": ({"enum": ["b", "a"]}, "b"),
    "const": ({"const": {"x": [1]}}, {"x": [1]}),
    "required only": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["b"],
        },
        {"b": ""},
    ),
    "required in the order of properties": (
        {"properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]},
        {"b": 1, "a": 2},
    ),
    "required without a property": (
        {"type": "object", "required": ["z"], "additionalProperties": {"type": "boolean"}},
        {"z": False},
    ),
    "nested": (
        {
            "type": "object",
            "required": ["o"],
            "properties": {
                "o": {
                    "type": "object",
                    "required": ["l"],
                    "properties": {"l": {"type": "array", "items": {"enum": [7]}, "minItems": 2}},
                }
            },
        },
        {"o": {"l": [7, 7]}},
    ),
    "anyOf takes the first": ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
    "oneOf beside properties": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}},
            "oneOf": [{"required": ["b"]}, {"required": ["a"]}],
        },
        {"b": 2},
    ),
    "allOf adds up": (
        {
            "allOf": [
                {"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ]
        },
        {"a": 1, "b": 2},
    ),
    "a type of several": ({"type": ["string", "null"]}, ""),
    "minLength": ({"type": "string", "minLength": 3}, "xxx"),
    "a date": ({"type": "string", "format": "date"}, "2026-01-01"),
    "minimum": ({"type": "integer", "minimum": 5}, 5),
    "above a fraction": ({"type": "integer", "minimum": 2.5, "maximum": 3}, 3),
    "exclusive and a multiple": ({"type": "integer", "exclusiveMinimum": 4, "multipleOf": 4}, 8),
    "below zero": ({"type": "number", "maximum": -1.5}, -1.5),
    "a reference": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"enum": ["deep"]}}},
        "deep",
    ),
    "a recursion that can end": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "boolean"}},
                    "required": ["v"],
                }
            },
        },
        {"v": False},
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 1},
        [1],
    ),
    "anything": (True, None),
    "any object": ({"type": "object"}, {}),
}


def least(schema: Any) -> Any:
    check_schema(schema)
    return instance_of(schema)


@pytest.mark.parametrize("case", CASES)
def test_the_instance_is_the_least_that_fits(case: str) -> None:
    schema, wanted = CASES[case]
    assert least(schema) == wanted


REFUSED: dict[str, Any] = {
    "unknown type": {"type": "object", "properties": {"a": {"type": "no-such-type"}}},
    "unknown type in a list": {"type": ["string", "huh"]},
    "a type that is an object": {"type": {"a": 1}},
    "no schema": ["a"],
    "empty enum": {"enum": []},
    "required is a text": {"type": "object", "required": "a"},
    "properties is a list": {"properties": []},
    "empty anyOf": {"anyOf": []},
    "false": False,
    "a reference to nothing": {"$ref": "#/$defs/x"},
    "a reference elsewhere": {"$ref": "http://example.org/schema"},
    "an endless recursion": {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "no number in between": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    "a pattern": {"type": "string", "pattern": "^a+$"},
    "a bound that is a text": {"type": "integer", "minimum": "1"},
    "an endless text": {"type": "string", "minLength": 10**9},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_met_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        least(REFUSED[case])


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested deeper"):
        check_schema(schema)
