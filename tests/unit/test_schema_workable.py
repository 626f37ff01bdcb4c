"""Schemas as a grammar can follow them: numbers end, remarks go, the rest stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from talaria_instance.engine.torch.schema import INTEGER_MAX, SMALLEST_STEP, workable

INTEGER = {"type": "integer"}
BOUNDED = {"type": "integer", "minimum": -INTEGER_MAX, "maximum": INTEGER_MAX}

CHANGED: dict[str, tuple[Any, Any]] = {
    "an integer": (INTEGER, BOUNDED),
    "one side given": (INTEGER | {"minimum": 1}, BOUNDED | {"minimum": 1}),
    "a number": ({"type": "number"}, BOUNDED | {"type": "number", "multipleOf": SMALLEST_STEP}),
    "or nothing": ({"type": ["integer", "null"]}, BOUNDED | {"type": ["integer", "null"]}),
    "a property": ({"properties": {"type": INTEGER}}, {"properties": {"type": BOUNDED}}),
    "a definition": ({"$defs": {"n": INTEGER}}, {"$defs": {"n": BOUNDED}}),
    "an alternative": ({"anyOf": [INTEGER, True]}, {"anyOf": [BOUNDED, True]}),
    "items": ({"items": INTEGER}, {"items": BOUNDED}),
    "an unknown format": ({"type": "string", "format": "path"}, {"type": "string"}),
    "listed items": ({"items": [INTEGER]}, {"items": [BOUNDED]}),
}


@pytest.mark.parametrize(("schema", "expected"), CHANGED.values(), ids=CHANGED)
def test_what_a_grammar_could_not_follow_to_an_end_changes(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert workable(schema) == expected
    assert schema == before


KEPT: dict[str, Any] = {
    "bounds of its own": {"type": "integer", "minimum": 0, "exclusiveMaximum": 9},
    "larger numbers asked for": {"type": "integer", "minimum": 10**20},
    "an enum": {"type": "integer", "enum": [1, 2]},
    "other types": {"type": "object", "properties": {"a": {"type": "string"}}},
    "a value that looks like a schema": {"const": INTEGER, "default": INTEGER},
    "a format that is checked": {"type": "string", "format": "date-time"},
    "a property named format": {"properties": {"format": {"type": "string"}}},
    "no schema at all": True,
}


@pytest.mark.parametrize("schema", KEPT.values(), ids=KEPT)
def test_everything_else_stays(schema: Any) -> None:
    assert workable(schema) == schema
