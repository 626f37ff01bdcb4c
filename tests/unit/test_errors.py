"""Errors keep their code, side and status over the wire."""

from __future__ import annotations

import pytest

from talaria_common.bus import BusDown, NoResponders, RequestTimeout, TooLarge, WrongRevision
from talaria_common.errors import (
    HTTP_STATUS,
    InvariantBroken,
    Rejected,
    TalariaError,
    Unavailable,
    from_code,
)


@pytest.mark.parametrize("code", HTTP_STATUS)
def test_a_code_means_the_same_after_the_wire(code: str) -> None:
    error = from_code(code, "why", param="messages", retry_after_s=2.0)
    assert (error.code, error.detail, error.param, error.retry_after_s) == (
        code,
        "why",
        "messages",
        2.0,
    )
    assert error.http_status == HTTP_STATUS[code]
    assert str(error) == f"{code}: why"


def test_overload_is_ours_though_its_status_is_429() -> None:
    assert isinstance(from_code("overloaded", ""), Unavailable)
    assert isinstance(from_code("quota_exceeded", ""), Rejected)


def test_an_unknown_code_is_ours_and_a_500() -> None:
    error = from_code("code_of_next_year", "x")
    assert isinstance(error, Unavailable)
    assert error.http_status == 500


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (NoResponders("a.b"), Unavailable, 503),
        (RequestTimeout("a.b", 1.5), Unavailable, 502),
        (BusDown("gone"), Unavailable, 503),
        (TooLarge(9, 8), Rejected, 413),
        (WrongRevision("k"), Unavailable, 500),
        (InvariantBroken("no"), TalariaError, 500),
    ],
)
def test_every_raised_error_has_a_known_code(
    error: TalariaError, kind: type[TalariaError], status: int
) -> None:
    assert isinstance(error, kind)
    assert error.code in HTTP_STATUS
    assert error.http_status == status
