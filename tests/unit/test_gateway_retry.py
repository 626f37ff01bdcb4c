"""When a call is placed again and when it is given up."""

from __future__ import annotations

import pytest

from talaria_common.wire import CallKey, ErrorInfo, RefusalReason, Refused
from talaria_gateway.retry import Retries, RetryReason


def refused(reason: RefusalReason, error: ErrorInfo | None = None) -> Refused:
    return Refused(key=CallKey("c"), reason=reason, error=error)


@pytest.mark.parametrize("reason", ["full", "draining", "unknown_model", "not_ready"])
def test_a_refusal_goes_elsewhere(reason: RefusalReason) -> None:
    retries = Retries()
    assert retries.refused(refused(reason), "i-1", is_new_boot=False) is None
    assert (retries.attempt, retries.excluded) == (2, ("i-1",))


def test_three_attempts_are_the_most_and_the_last_word_is_the_callers() -> None:
    retries = Retries()
    assert retries.no_responders("i-1") is None
    assert retries.no_responders("i-2") is None
    error = retries.refused(refused("full"), "i-3", is_new_boot=False)
    assert error is not None
    assert (error.code, retries.attempt) == ("overloaded", 3)


def test_invalid_is_the_callers_error_at_once() -> None:
    info = ErrorInfo(code="context_length_exceeded", detail="4096 of 2048", param="messages")
    error = Retries().refused(refused("invalid", info), "i-1", is_new_boot=False)
    assert error is not None
    assert (error.code, error.param, error.http_status) == (
        "context_length_exceeded",
        "messages",
        400,
    )


def test_cancelled_ends_the_call() -> None:
    error = Retries().refused(refused("cancelled"), "i-1", is_new_boot=False)
    assert error is not None
    assert error.code == "cancelled"


@pytest.mark.parametrize("reason", ["stale_epoch", "not_ready"])
def test_a_new_boot_neither_excludes_nor_counts_at_most_three_times(reason: RefusalReason) -> None:
    retries = Retries()
    for attempt in (2, 3, 4):
        assert retries.refused(refused(reason), "i-1", is_new_boot=True) is None
        assert (retries.attempt, retries.excluded) == (attempt, ())
    assert retries.refused(refused(reason), "i-1", is_new_boot=True) is None
    assert retries.excluded == ("i-1",)


def test_no_answer_ranks_the_instance_last_and_does_not_exclude_it() -> None:
    retries = Retries()
    assert retries.no_answer("i-1") is None
    assert (retries.excluded, retries.ranked_last) == ((), ("i-1",))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (RetryReason.SILENCE, "connection_lost"),
        (RetryReason.GAP, "connection_lost"),
        (RetryReason.INSTANCE_LOST, "instance_lost"),
    ],
)
def test_the_first_token_is_the_point_of_no_return(reason: RetryReason, code: str) -> None:
    retries = Retries()
    assert retries.lost("i-1", reason, has_token=False) is None
    assert retries.excluded == ("i-1",)
    error = retries.lost("i-2", reason, has_token=True)
    assert error is not None
    assert error.code == code
