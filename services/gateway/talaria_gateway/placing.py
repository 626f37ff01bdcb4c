"""Asking the router for a place (protocols 1): the same attempt again until it answers. IO."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from talaria_common import chain, subjects, wire
from talaria_common.bus import Bus, NoResponders, RequestTimeout
from talaria_common.errors import Unavailable
from talaria_common.wire import CallKey, Granted, Link, PlaceCall, PlaceReply
from talaria_gateway.account import Ask
from talaria_gateway.config import GatewayConfig
from talaria_gateway.retry import Retries

PAUSE_S: Final = 0.2
"""Between tries to reach a router that is not there."""
ABSENT_S: Final = 3.0
"""For how long that is tried: a lone router that died is back by then."""


def question(ask: Ask, links: Sequence[Link], retries: Retries) -> PlaceCall:
    """What the router is asked for the call's next attempt."""
    return PlaceCall(
        key=CallKey(ask.call_id, retries.attempt),
        model=ask.checked.model,
        tenant=ask.tenant,
        session=ask.identity.session,
        source=ask.identity.source,
        parent=ask.identity.parent,
        is_final=ask.identity.is_final,
        links=tuple(links[-chain.LINKS_MAX :]),
        prompt_bytes=links[-1].end_bytes if links else 0,
        max_tokens=ask.checked.max_tokens,
        excluded=retries.excluded,
        ranked_last=retries.ranked_last,
        arrived_unix_s=ask.arrived_unix_s,
    )


async def ask_router(
    bus: Bus, config: GatewayConfig, place: PlaceCall, on_unreadable: Callable[[], None]
) -> PlaceReply:
    """The answer for this attempt; raises Unavailable `no_instance` when no router gives one."""
    payload = wire.encode(place)
    tries, absent_s = 0, 0.0
    while tries < config.place_tries and absent_s < ABSENT_S:
        try:
            answer = await bus.request(subjects.PLACE, payload, timeout_s=config.place_timeout_s)
        except NoResponders:
            absent_s += PAUSE_S
            await asyncio.sleep(PAUSE_S)
            continue
        except RequestTimeout:
            tries += 1
            continue
        tries += 1
        reply = wire.decode(wire.PLACE_REPLY, answer.payload)
        if reply is not None and _key_of(reply) == place.key:
            return reply
        on_unreadable()
    raise Unavailable("no_instance", "no router answers", retry_after_s=1.0)


def _key_of(reply: PlaceReply) -> CallKey:
    return reply.grant.key if isinstance(reply, Granted) else reply.key
