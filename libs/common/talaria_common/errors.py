"""Errors that cross a service's border, by whose fault they are. Pure.

TalariaError                 code (stable snake_case), detail, param, retry_after_s
├── Rejected                 the caller's fault: a 4xx
├── Unavailable              ours, a retry may help: a 429 or 5xx
└── InvariantBroken          a bug: log the state, stop, restart

Expected outcomes inside a service are effects or values, not exceptions.
"""

from __future__ import annotations

from typing import Final

HTTP_STATUS: Final[dict[str, int]] = {
    # Rejected
    "invalid_request": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
    "unauthorised": 401,
    "unknown_model": 404,
    "unknown_session": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "session_closed": 409,
    "superseded": 409,
    "too_large": 413,
    "quota_exceeded": 429,
    "cancelled": 499,
    # Unavailable
    "overloaded": 429,
    "model_failed": 503,
    "no_instance": 503,
    "bus_down": 503,
    "instance_lost": 502,
    "instance_unreachable": 502,
    "connection_lost": 502,
    "deadline_exceeded": 504,
    "internal": 500,
}
"""HTTP status of each error code; every code that a service may answer is here."""


class TalariaError(Exception):
    """An outcome that ends a call, with a stable code and a text that says what to do next."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """Status of the HTTP answer; 500 for a code this version does not know."""
        return HTTP_STATUS.get(self.code, 500)


class Rejected(TalariaError):
    """The caller's fault; the same call will fail again."""


class Unavailable(TalariaError):
    """Ours; the same call may succeed later."""


class InvariantBroken(TalariaError):
    """A bug: the state is no longer trusted."""

    def __init__(self, detail: str) -> None:
        super().__init__("internal", detail)


REJECTED_CODES: Final = frozenset(
    code for code, status in HTTP_STATUS.items() if status < 500 and code != "overloaded"
)


def from_code(
    code: str, detail: str, *, param: str | None = None, retry_after_s: float | None = None
) -> TalariaError:
    """The exception of an error that came over the wire."""
    kind = Rejected if code in REJECTED_CODES else Unavailable
    return kind(code, detail, param=param, retry_after_s=retry_after_s)
