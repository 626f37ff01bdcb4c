"""Sending a body to the granted instance (protocols 1, 12). IO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from talaria_common import bodies, subjects, wire
from talaria_common.bus import Bus, NoResponders, RequestTimeout
from talaria_common.wire import Accepted, BodyPart, Granted, Link, Refused, RunCall
from talaria_gateway.account import Ask
from talaria_gateway.retry import RetryReason

ANSWER_WITHIN_S: Final = 30.0
"""Bound of the request itself; an attempt's patience ends long before."""


def run_call(
    ask: Ask, granted: Granted, tail: Link | None, deadline_s: float, delivery: Mapping[str, Any]
) -> tuple[RunCall, tuple[BodyPart, ...]]:
    """The message that runs a granted call, and the parts to send before it.

    `delivery`: RunCall's fields that say where the tokens go.
    """
    body, parts, digest = bodies.split(granted.grant.key, ask.checked.raw)
    run = RunCall(
        grant=granted.grant,
        endpoint=ask.checked.endpoint,
        session=granted.session,
        call_index=granted.call_index,
        tenant=ask.tenant,
        is_continuation=granted.is_continuation,
        is_final=ask.identity.is_final,
        body=body,
        parts=len(parts),
        digest=digest,
        tail=tail,
        deadline_s=deadline_s,
        started_unix_s=granted.started_unix_s or ask.arrived_unix_s,
        **delivery,
    )
    return run, parts


async def send(
    bus: Bus, run: RunCall, parts: tuple[BodyPart, ...], on_unreadable: Callable[[], None]
) -> Accepted | Refused | RetryReason:
    """The instance's answer, or why there is none."""
    instance = run.grant.instance
    for part in parts:
        await bus.publish(subjects.body_part(instance), wire.encode(part))
    try:
        answer = await bus.request(
            subjects.run(instance), wire.encode(run), timeout_s=ANSWER_WITHIN_S
        )
    except NoResponders:
        return RetryReason.NO_RESPONDERS
    except RequestTimeout:
        return RetryReason.NO_ANSWER
    reply = wire.decode(wire.RUN_REPLY, answer.payload)
    if reply is None or reply.key != run.grant.key:
        on_unreadable()
        return RetryReason.NO_ANSWER
    return reply
