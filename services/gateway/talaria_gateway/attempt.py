"""One attempt at a call on one instance, as its stream tells. IO (futures of the event loop)."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from talaria_common.wire import CallKey, CallParts, Ended, Granted, Refused, StreamMessage
from talaria_gateway.retry import RetryReason

Outcome: TypeAlias = Ended | Refused | RetryReason
"""How an attempt ended: by itself, not taken, or lost."""


class Attempt:
    """What is known of the attempt now; the stream's messages are numbered from 1."""

    def __init__(self, granted: Granted, now_s: float, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.granted = granted
        self.sent_s = now_s
        self.heard_s = now_s
        self.accepted_s: float | None = None
        self.patience_s = patience_s
        self.first_token_s: float | None = None
        self.is_held = False
        """Counted among the calls that instances hold."""
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.unanswered: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[Outcome] = loop.create_future()
        self._next_seq = 1

    @property
    def key(self) -> CallKey:
        return self.granted.grant.key

    @property
    def instance(self) -> str:
        return self.granted.grant.instance

    @property
    def boot_id(self) -> str:
        return self.granted.grant.boot_id

    @property
    def has_token(self) -> bool:
        """A token has come: the call stays with this attempt."""
        return self.first_token_s is not None

    def lost_parts(self, now_s: float) -> CallParts:
        """Where the time of an accepted attempt went that does not end by itself, as far as seen."""
        if self.accepted_s is None:
            return CallParts()
        if self.first_token_s is None:
            return CallParts(queue_s=now_s - self.accepted_s)
        return CallParts(
            queue_s=self.first_token_s - self.accepted_s, decode_s=now_s - self.first_token_s
        )

    def wait(self, seconds: float) -> None:
        """So much of the time for an answer is over; without any left the outcome is unknown."""
        self.patience_s -= seconds
        if self.patience_s <= 0 and not self.unanswered.done():
            self.unanswered.set_result(None)

    def accept(self, now_s: float) -> bool:
        """The instance has the call; True the first time."""
        if self.accepted_s is not None:
            return False
        self.accepted_s = self.heard_s = now_s
        if not self.accepted.done():
            self.accepted.set_result(None)
        return True

    def takes(self, message: StreamMessage, now_s: float) -> bool:
        """The message belongs here and is the next one; a gap ends the attempt."""
        if message.key != self.key or self.over.done():
            return False
        self.heard_s = now_s
        if message.seq < self._next_seq:
            return False
        if message.seq > self._next_seq:
            self.end(RetryReason.GAP)
            return False
        self._next_seq = message.seq + 1
        return True

    def end(self, outcome: Outcome) -> None:
        """The attempt is over; the first word counts."""
        if not self.over.done():
            self.over.set_result(outcome)
