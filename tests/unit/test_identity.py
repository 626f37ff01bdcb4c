"""Whose call it is: order of sources, spelling of names, bad ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from talaria_common.errors import Rejected
from talaria_gateway.identity import (
    from_headers,
    is_id,
    normalised,
    request_id,
    resolve,
    tenant,
)

# From the strongest source down, as the cases' README has it.
HEADERS = [
    ("X-Talaria-Session-ID", "header"),
    ("X-Dynamo-Session-ID", "header"),
    ("X-Session-ID", "header"),
    ("X-Claude-Code-Agent-ID", "native"),
    ("X-Claude-Code-Session-ID", "native"),
    ("thread-id", "native"),
    ("session-id", "native"),
    ("X-Session-Affinity", "native"),
    ("X-OpenCode-Session", "native"),
    ("X-LiteLLM-Session-ID", "native"),
    ("X-LiteLLM-Trace-ID", "native"),
    ("X-SMG-Routing-Key", "native"),
]
BODIES: list[dict[str, Any]] = [
    {"session_id": "s0"},
    {"nvext": {"agent_context": {"session_id": "s1"}}},
    {"nvext": {"session_control": {"session_id": "s2"}}},
    {"conversation": {"id": "s3"}},
    {"conversation_id": "s4"},
    {"metadata": {"session_id": "s5"}},
    {"metadata": {"user_id": json.dumps({"session_id": "s6"})}},
    {"prompt_cache_key": "s7"},
]


def test_the_first_source_that_is_there_wins() -> None:
    left = [(name, f"id-{n}") for n, (name, _) in enumerate(HEADERS)]
    for n, (_, source) in enumerate(HEADERS):
        found = resolve(normalised(left[n:]), {"session_id": "from-the-body"})
        assert (found.session, found.source) == (f"id-{n}", source)
    found = resolve({}, {"session_id": "from-the-body"})
    assert (found.session, found.source) == ("from-the-body", "body")


@pytest.mark.parametrize("n", range(len(BODIES)))
def test_a_field_of_the_body_names_the_session(n: int) -> None:
    merged: dict[str, Any] = {}
    for body in reversed(BODIES[n:]):
        for key, value in body.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merged[key] | value if both else value
    assert resolve({}, merged).session == f"s{n}"
    assert resolve({}, BODIES[n]).source == "body"


def test_a_conversation_may_be_a_plain_string() -> None:
    assert resolve({}, {"conversation": "conv_1"}).session == "conv_1"


def test_an_earlier_answer_leads_to_its_session() -> None:
    body = {"previous_response_id": "chatcmpl-1"}
    assert resolve({}, body, {"chatcmpl-1": "s1"}.get).session == "s1"
    assert resolve({}, body, {}.get).source == "derived"


@pytest.mark.parametrize("name", ["x_session_id", "X-SESSION-ID", "X-Session_Id"])
def test_case_and_underscores_of_a_name_do_not_matter(name: str) -> None:
    assert from_headers(normalised([(name, "s1")])).session == "s1"


@pytest.mark.parametrize("name", ["X-Talaria-Session-ID", "X-Session-ID", "X-Parent-Session-ID"])
@pytest.mark.parametrize("value", ["x" * 257, "a\tb", "", "a\x7fb"])
def test_a_bad_id_in_our_own_header_is_the_callers_error(name: str, value: str) -> None:
    with pytest.raises(Rejected) as refused:
        from_headers(normalised([(name, value)]))
    assert refused.value.code == "invalid_request"
    assert refused.value.param == name


def test_a_bad_id_elsewhere_is_ignored_and_counted() -> None:
    headers = normalised([("session-id", "a\tb"), ("X-OpenCode-Session", "good")])
    found = resolve(headers, {})
    assert (found.session, found.source, found.ignored) == ("good", "native", 1)
    found = resolve({}, {"session_id": 5, "prompt_cache_key": "x" * 300})
    assert (found.session, found.source, found.ignored) == (None, "derived", 2)


@pytest.mark.parametrize(
    "body", [{"metadata": "text"}, {"nvext": []}, {"metadata": {"user_id": "{"}}]
)
def test_fields_of_another_shape_name_nothing(body: dict[str, Any]) -> None:
    assert resolve({}, body).session is None


def test_user_and_request_id_are_no_sessions() -> None:
    assert resolve({"x-request-id": "r1"}, {"user": "u1"}).source == "derived"


@pytest.mark.parametrize("name", ["X-Parent-Session-ID", "X-Claude-Code-Parent-Agent-ID"])
def test_the_parent_is_read_and_never_the_session_itself(name: str) -> None:
    assert from_headers(normalised([(name, "p"), ("X-Session-ID", "c")])).parent == "p"
    assert from_headers(normalised([(name, "c"), ("X-Session-ID", "c")])).parent is None


def test_the_end_of_a_session_is_said_by_a_header() -> None:
    assert from_headers({"x-talaria-session-final": "true"}).is_final
    assert not from_headers({"x-talaria-session-final": "false"}).is_final


def test_the_tenant_is_the_key_else_the_header_and_the_key_is_not_shown() -> None:
    by_bearer = tenant({"authorization": "Bearer secret", "x-tenant-id": "t1"})
    assert by_bearer == tenant({"x-api-key": "secret"}) != tenant({"x-api-key": "other"})
    assert "secret" not in by_bearer
    assert tenant({"x-tenant-id": "t1"}) == "t1"
    assert tenant({}) == ""


def test_a_short_printable_request_id_is_kept() -> None:
    assert request_id({"x-request-id": "r-1"}) == "r-1"
    for bad in ("", "x" * 129, "a\tb", "é"):
        assert request_id({"x-request-id": bad}) is None


def test_ids_are_whole_printable_strings() -> None:
    assert is_id("x" * 256)
    assert is_id("a b/c ü")
    assert not any(map(is_id, ("", "x" * 257, "a\nb", 5, None, ["a"])))
