"""Which prompts this instance could reuse, named by their chain links (protocols 5). Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from talaria_common.wire import HeldPrefix, Tier
from talaria_instance.engine.protocol import EngineCall, Locality

LOOK_ALL_S: Final = 0.5
"""Least time between two looks at all sessions: as often as the heartbeat."""

SessionKey = tuple[str, str, str]
"""Tenant, session, model."""


@dataclass(eq=False)
class _Last:
    """The last prompt of one session on one model."""

    prompt: bytes
    call: EngineCall
    held: tuple[HeldPrefix, ...] | None
    """As last looked at; None: look again now."""
    reply: bytes = b""
    reply_tokens: int = 0


class PrefixTable:
    """The last prompts of the most recent sessions, and where their KV is now."""

    def __init__(self, most: int, locality: Callable[[EngineCall], Locality]) -> None:
        self._most = most
        self._locality = locality
        self._last: OrderedDict[SessionKey, _Last] = OrderedDict()
        self._looked_s = float("-inf")

    def prompt(self, session: SessionKey, digest: bytes, call: EngineCall) -> None:
        """A call's prompt is computed."""
        before = self._last.get(session)
        self._last[session] = _Last(digest, call, before.held if before is not None else ())
        self._last.move_to_end(session)
        while len(self._last) > self._most:
            self._last.popitem(last=False)

    def reply(self, session: SessionKey, call: EngineCall, digest: bytes, tokens: int) -> None:
        """That call's reply is complete: `tokens` more belong to the prefix."""
        last = self._last.get(session)
        if last is not None and last.call.key == call.key:
            last.reply, last.reply_tokens, last.held = digest, tokens, None

    def held(self, now_s: float) -> tuple[HeldPrefix, ...]:
        """For the snapshot; at most `LOOK_ALL_S` old, that of a session whose reply came since new."""
        is_due = now_s - self._looked_s >= LOOK_ALL_S
        if is_due:
            self._looked_s = now_s
        out: list[HeldPrefix] = []
        for last in self._last.values():
            if is_due or last.held is None:
                last.held = self._look(last)
            out += last.held
        return tuple(out)

    def _look(self, last: _Last) -> tuple[HeldPrefix, ...]:
        where = self._locality(last.call)
        tokens = where.device_tokens + where.host_tokens
        if not tokens:
            return ()
        tier: Tier = "host" if where.host_tokens else "device"
        prompt = HeldPrefix(last.prompt, tokens, tier)
        if not last.reply:
            return (prompt,)
        return prompt, HeldPrefix(last.reply, tokens + last.reply_tokens, tier)
