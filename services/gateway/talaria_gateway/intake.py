"""From headers and body to a call: the same for both doors. Pure but for the ids it mints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from talaria_common import chain
from talaria_common.errors import Rejected, Unavailable
from talaria_common.ids import new_ulid
from talaria_common.wire import Endpoint
from talaria_gateway import identity, json_body, validate
from talaria_gateway.account import Ask
from talaria_gateway.calls import Calls


class Intake:
    """Checks calls before anything is done for them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def ask(
        self,
        endpoint: Endpoint,
        headers: Mapping[str, str],
        raw: bytes,
        *,
        request_id: str,
        arrived_s: float,
        arrived_unix_s: float,
        call_id: str | None = None,
    ) -> Ask:
        """The call, ready to be placed; raises what the caller has done wrong."""
        config = self._calls.config
        if len(raw) > config.body_bytes_max:
            raise too_large(config.body_bytes_max)
        tenant = identity.tenant(headers)
        body = json_body.decode_object(raw)
        session_of = partial(self._calls.answers.session_of, tenant)
        who = identity.resolve(headers, body, session_of)
        self._calls.account.ignored_ids(who.ignored)
        checked = validate.check(endpoint, body, raw, messages_max=config.messages_max)
        self._check_model(checked.model)
        return Ask(
            call_id=call_id or new_ulid(),
            request_id=request_id,
            checked=checked.without_parsed(),
            links=tuple(checked.links(tenant)[-chain.LINKS_MAX :]),
            identity=who,
            tenant=tenant,
            arrived_s=arrived_s,
            arrived_unix_s=arrived_unix_s,
        )

    def _check_model(self, model: str) -> None:
        known = self._calls.pool.models()
        if not known:
            raise Unavailable("no_instance", "no instance has reported yet", retry_after_s=1.0)
        if model not in known:
            names = ", ".join(known)
            detail = f"the model {model!r} does not exist; there are: {names}"
            raise Rejected("unknown_model", detail, param="model")


def too_large(limit: int) -> Rejected:
    """The body is over the limit."""
    return Rejected("too_large", f"the body is larger than the limit of {limit} bytes")
