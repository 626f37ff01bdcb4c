"""When a call is placed again, and when it is given up (protocols 1). Pure.

At most three attempts. A refusal because of an old epoch, or by a new boot of the instance, says
nothing about the instance: it neither excludes it nor counts, at most three times. The first token
is the point of no return.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from talaria_common.errors import Rejected, TalariaError, Unavailable, from_code
from talaria_common.wire import Ended, EndReason, ErrorInfo, Refused

ATTEMPTS_MAX: Final = 3
FREE_MAX: Final = 3
FREE_PAUSE_S: Final = 0.1
"""Time for the news of the new boot or leader to reach the router."""


class RetryReason(StrEnum):
    """Why an attempt was followed by another."""

    REFUSED = "refused"
    NO_RESPONDERS = "no_responders"
    NO_ANSWER = "no_answer"
    INSTANCE_LOST = "instance_lost"
    SILENCE = "silence"
    GAP = "gap"
    """Messages of its stream were lost."""


def error_of(info: ErrorInfo) -> TalariaError:
    """The exception of an error on the wire."""
    return from_code(info.code, info.detail, param=info.param, retry_after_s=info.retry_after_s)


def error_of_end(ended: Ended) -> TalariaError | None:
    """What an attempt's own end means for its call; None: it is answered."""
    match ended.reason:
        case EndReason.FINISHED:
            return None
        case EndReason.CANCELLED:
            return Rejected("cancelled", "the call was cancelled")
        case EndReason.FAILED if ended.error is not None:
            return error_of(ended.error)
        case EndReason.FAILED:
            return Unavailable("model_failed", "the engine gave the call up")
        case EndReason.SUPERSEDED | EndReason.INSTANCE_LOST:
            return Unavailable("instance_lost", "the instance has lost the call")


class Retries:
    """The attempts of one call; each method returns None to go on, or the error that ends the call."""

    def __init__(self) -> None:
        self.attempt = 1
        self.excluded: tuple[str, ...] = ()
        self.ranked_last: tuple[str, ...] = ()
        self.pause_s = 0.0
        """To wait before the next attempt."""
        self.last_error: TalariaError | None = None
        """What the latest attempt failed with, for when there is no place left."""
        self._counted = 1
        self._free = 0

    def refused(self, refused: Refused, instance: str, *, is_new_boot: bool) -> TalariaError | None:
        """The instance did not take the call."""
        match refused.reason:
            case "invalid":
                info = refused.error or ErrorInfo(
                    code="invalid_request", detail="the call is invalid"
                )
                return error_of(info)
            case "cancelled":
                return Rejected("cancelled", "the call was cancelled")
            case "stale_epoch":
                return self._free_again(instance)
            case "not_ready" if is_new_boot:
                return self._free_again(instance)
            case "full" | "draining":
                detail = f"instance {instance} is {refused.reason}"
                retry_after_s = refused.error.retry_after_s if refused.error else None
                error = Unavailable("overloaded", detail, retry_after_s=retry_after_s or 1.0)
                return self._elsewhere(instance, error)
            case _:
                error = Unavailable("no_instance", f"instance {instance}: {refused.reason}")
                return self._elsewhere(instance, error)

    def no_responders(self, instance: str) -> TalariaError | None:
        """Nobody listens under the instance's name."""
        return self._elsewhere(
            instance, Unavailable("instance_lost", f"instance {instance} is gone")
        )

    def no_answer(self, instance: str) -> TalariaError | None:
        """The run was not answered: its outcome is unknown, the instance may only be slow."""
        error = Unavailable("instance_unreachable", f"instance {instance} does not answer")
        self.ranked_last = (*self.ranked_last, instance)
        return self._count(error)

    def lost(self, instance: str, reason: RetryReason, *, has_token: bool) -> TalariaError | None:
        """An accepted attempt is lost; with a token out there is no way back."""
        match reason:
            case RetryReason.SILENCE:
                error = Unavailable("connection_lost", f"nothing heard from instance {instance}")
            case RetryReason.GAP:
                error = Unavailable("connection_lost", "a part of the answer was lost on its way")
            case _:
                detail = f"instance {instance} was lost with the call on it"
                error = Unavailable("instance_lost", detail)
        return error if has_token else self._elsewhere(instance, error)

    def _elsewhere(self, instance: str, error: TalariaError) -> TalariaError | None:
        if instance not in self.excluded:
            self.excluded = (*self.excluded, instance)
        return self._count(error)

    def _count(self, error: TalariaError) -> TalariaError | None:
        if self._counted == ATTEMPTS_MAX:
            return error
        self._counted += 1
        self.attempt += 1
        self.pause_s = 0.0
        self.last_error = error
        return None

    def _free_again(self, instance: str) -> TalariaError | None:
        if self._free == FREE_MAX:
            return self._elsewhere(
                instance,
                Unavailable("no_instance", f"instance {instance} keeps refusing its grants"),
            )
        self._free += 1
        self.attempt += 1
        self.pause_s = FREE_PAUSE_S
        return None
