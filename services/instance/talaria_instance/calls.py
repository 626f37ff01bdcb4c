"""The calls of an instance: which it may take, holds, has ended (protocols 1, 2). Pure.

    arrive ──▶ under check ──▶ accepted ──▶ ended
                   │
                   └─▶ refused

Whatever arrives again is answered with its earlier outcome; a cancelled key is never run.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from talaria_common import chain
from talaria_common.wire import (
    CallEnded,
    CallKey,
    ErrorInfo,
    LiveGrant,
    RefusalReason,
    RunCall,
    RunReply,
    ToolDelta,
)
from talaria_instance.config import InstanceConfig
from talaria_instance.engine.protocol import EngineCall
from talaria_instance.ledger import Ledger

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class Reply:
    """The generated message, put together from its pieces."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index to [name, argument pieces ...]."""

    def add(self, text: str, tool_calls: Iterable[ToolDelta]) -> None:
        """Take a piece of the output."""
        if text:
            self.text.append(text)
        for delta in tool_calls:
            pieces = self.calls.setdefault(delta.index, [""])
            pieces[0] = delta.name or pieces[0]
            pieces.append(delta.arguments)

    def digest(self, prompt: bytes) -> bytes:
        """The chain's digest after this message."""
        message = {
            "role": "assistant",
            "content": "".join(self.text) or None,
            "tool_calls": [
                {"function": {"name": pieces[0], "arguments": "".join(pieces[1:])}}
                for _, pieces in sorted(self.calls.items())
            ],
        }
        return chain.extend(prompt, message)


@dataclass(eq=False)
class Call:
    """One attempt that this instance holds."""

    run: RunCall
    """Without its body once that is read."""
    arrived_s: float
    body_bytes: int
    asked_by: list[str] = field(default_factory=list)
    """Reply subjects of the run and its repeats, while under check."""
    prepared: EngineCall | None = None
    ledger: Ledger | None = None
    """From acceptance on."""
    is_admitted: bool = False
    """The engine has it."""
    has_token: bool = False
    cached_tokens: int = 0
    restored_tokens: int = 0
    tokens: int = 0
    reply: Reply = field(default_factory=Reply)

    @property
    def key(self) -> CallKey:
        return self.run.grant.key

    @property
    def model(self) -> str:
        return self.run.grant.model

    @property
    def is_accepted(self) -> bool:
        return self.ledger is not None

    @property
    def state(self) -> Literal["queued", "paused", "running"]:
        """As its stream tells it."""
        if self.ledger is not None and self.ledger.is_running:
            return "running"
        return "paused" if self.is_admitted else "queued"


class CallBook:
    """All that an instance remembers of attempts."""

    def __init__(
        self, config: InstanceConfig, instance: str, boot_id: str, models: Iterable[str]
    ) -> None:
        self._config = config
        self._instance = instance
        self._boot_id = boot_id
        self._models = frozenset(models)
        self.live: dict[CallKey, Call] = {}
        self.epoch_seen = 0
        self.is_draining = False
        self._outcomes: OrderedDict[CallKey, RunReply] = OrderedDict()
        self._had_token: OrderedDict[CallKey, bool] = OrderedDict()
        self._tombstones: OrderedDict[CallKey, float] = OrderedDict()
        self._highest: OrderedDict[str, int] = OrderedDict()
        self._ended: deque[tuple[float, CallEnded]] = deque()

    # --- asking ---------------------------------------------------------------------------------

    def outcome(self, key: CallKey) -> RunReply | None:
        """What an earlier run of this key was answered."""
        return self._outcomes.get(key)

    def refusal(self, run: RunCall, now_s: float) -> RefusalReason | None:
        """Why a run may not start here now; asked on arrival and again before Accepted."""
        grant = run.grant
        if grant.boot_id != self._boot_id or grant.instance != self._instance:
            return "not_ready"
        if grant.epoch < self.epoch_seen:
            return "stale_epoch"
        is_dead = self._tombstones.get(grant.key, now_s) > now_s
        if is_dead or grant.key.attempt < self._highest.get(grant.key.call_id, 0):
            return "cancelled"
        if self.is_draining:
            return "draining"
        return None if grant.model in self._models else "unknown_model"

    def is_full(self, body_bytes: int) -> bool:
        """Whether one more call with such a body is too many."""
        return (
            self.queued_calls >= self._config.queued_calls_max
            or self.queued_bytes + body_bytes > self._config.queued_bytes_max
        )

    @property
    def queued_calls(self) -> int:
        """Calls that wait, those under check included."""
        return sum(1 for call in self.live.values() if not call.is_admitted)

    @property
    def queued_bytes(self) -> int:
        """Bytes of their bodies."""
        return sum(call.body_bytes for call in self.live.values() if not call.is_admitted)

    def lower_attempts(self, key: CallKey) -> list[Call]:
        """Live earlier attempts at the same call."""
        return [
            call
            for call in self.live.values()
            if call.key.call_id == key.call_id and call.key.attempt < key.attempt
        ]

    def had_token(self, key: CallKey) -> bool | None:
        """Whether a token of the attempt went out; None: never seen here."""
        call = self.live.get(key)
        return call.has_token if call is not None else self._had_token.get(key)

    def live_grants(self) -> tuple[LiveGrant, ...]:
        """For the snapshot."""
        return tuple(
            LiveGrant(
                grant=call.run.grant,
                tenant=call.run.tenant,
                session=call.run.session,
                call_index=call.run.call_index,
                tail=call.run.tail,
                is_accepted=call.is_accepted,
            )
            for call in self.live.values()
        )

    def ended(self, now_s: float) -> tuple[CallEnded, ...]:
        """For the snapshot: attempts that ended lately, with their age."""
        self._forget(now_s)
        return tuple(
            msgspec.structs.replace(ended, age_s=max(0.0, now_s - at_s))
            for at_s, ended in self._ended
        )

    # --- telling --------------------------------------------------------------------------------

    def see_epoch(self, epoch: int) -> None:
        """An epoch was heard of; older ones are refused from now on."""
        self.epoch_seen = max(self.epoch_seen, epoch)

    def arrive(self, run: RunCall, reply: str, body_bytes: int, now_s: float) -> Call:
        """Hold a run while it is checked."""
        call = Call(run=run, arrived_s=now_s, body_bytes=body_bytes, asked_by=[reply])
        self.live[call.key] = call
        highest = max(call.key.attempt, self._highest.get(call.key.call_id, 0))
        _remember(self._highest, call.key.call_id, highest, self._config.outcomes_max)
        return call

    def settle(self, key: CallKey, answer: RunReply) -> None:
        """A run was answered; a refused one is not held any longer."""
        _remember(self._outcomes, key, answer, self._config.outcomes_max)
        call = self.live.get(key)
        if call is not None and not call.is_accepted:
            del self.live[key]

    def bury(self, key: CallKey, now_s: float) -> None:
        """Never run this key, should it still arrive."""
        self._tombstones.pop(key, None)
        until_s = now_s + self._config.tombstone_s
        _remember(self._tombstones, key, until_s, self._config.outcomes_max)

    def end(self, call: Call, ended: CallEnded, now_s: float) -> None:
        """An accepted call is over."""
        del self.live[call.key]
        _remember(self._had_token, call.key, call.has_token, self._config.outcomes_max)
        self._ended.append((now_s, ended))
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._ended and now_s - self._ended[0][0] > self._config.ended_kept_s:
            self._ended.popleft()
        while self._tombstones and next(iter(self._tombstones.values())) <= now_s:
            self._tombstones.popitem(last=False)


def refusal_error(reason: RefusalReason, model: str) -> ErrorInfo | None:
    """What a caller may be told about a refusal; None: nothing, the gateway places again."""
    if reason == "unknown_model":
        return ErrorInfo(code="unknown_model", detail=f"no model {model!r} here", param="model")
    return None


def _remember(table: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    table[key] = value
    while len(table) > most:
        table.popitem(last=False)
