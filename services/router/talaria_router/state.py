"""The router's view: instances, the prefixes they hold, sessions, sizes of tokens. Pure.

All of it is hearsay and may be a snapshot old; the account of load is admission's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from talaria_common.errors import InvariantBroken
from talaria_common.wire import (
    CallEnded,
    HeldPrefix,
    InstanceLoad,
    Link,
    LoadState,
    ModelState,
    Snapshot,
    Tier,
)

REUSABLE: Final[frozenset[Tier]] = frozenset(("device", "host"))
RATE_WEIGHT: Final = 0.25
"""Weight of the newest call in a rate: the last four calls or so count."""
K = TypeVar("K")
V = TypeVar("V")


class Bounded(Generic[K, V]):
    """A mapping that forgets what was written longest ago."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        self._items.pop(key, None)
        self._items[key] = value
        if len(self._items) > self._limit:
            del self._items[next(iter(self._items))]

    def drop(self, key: K) -> None:
        self._items.pop(key, None)

    def __len__(self) -> int:
        return len(self._items)


@dataclass(slots=True, eq=False)
class InstanceView:
    """One instance as its latest snapshot shows it."""

    snapshot: Snapshot
    heard_s: float
    is_gone: bool = False
    dead_boots: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    models: dict[str, ModelState] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return self.snapshot.instance

    @property
    def takes_work(self) -> bool:
        return self.snapshot.is_ready and not self.snapshot.is_draining and not self.is_gone

    def age_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.heard_s)


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt an instance can reuse: its longest known link."""

    tokens: int = 0
    tier: Tier = "absent"
    device_tokens: int = 0
    """Of these, on the device already."""
    end_bytes: int = 0

    @property
    def restored_tokens(self) -> int:
        """Tokens that must be copied up from the host."""
        return max(0, self.tokens - self.device_tokens)


class Prefixes:
    """Chain link -> the instances that hold the prompt prefix up to it."""

    def __init__(self) -> None:
        self._by_link: dict[bytes, dict[str, HeldPrefix]] = {}
        self._by_instance: dict[str, dict[bytes, HeldPrefix]] = {}

    def replace(self, instance: str, held: Iterable[HeldPrefix]) -> None:
        """What the instance holds now, all of it."""
        for digest in self._by_instance.pop(instance, {}):
            holders = self._by_link[digest]
            del holders[instance]
            if not holders:
                del self._by_link[digest]
        for prefix in held:
            self.add(instance, prefix)

    def add(self, instance: str, prefix: HeldPrefix) -> None:
        """One more, until the instance's next snapshot."""
        self._by_instance.setdefault(instance, {})[prefix.digest] = prefix
        self._by_link.setdefault(prefix.digest, {})[instance] = prefix

    def match(self, links: Sequence[Link]) -> dict[str, Match]:
        """The longest known link on each instance that knows any."""
        found: dict[str, Match] = {}
        for link in links:
            for instance, held in self._by_link.get(link.digest, {}).items():
                if held.tier not in REUSABLE:
                    continue
                before = found.get(instance, Match())
                is_device = held.tier == "device"
                found[instance] = Match(
                    tokens=max(held.tokens, before.tokens),
                    tier=held.tier,
                    device_tokens=held.tokens if is_device else before.device_tokens,
                    end_bytes=link.end_bytes,
                )
        return found

    def check(self) -> None:
        """Raise InvariantBroken unless both directions agree."""
        forward = {(d, i) for d, holders in self._by_link.items() for i in holders}
        backward = {(d, i) for i, held in self._by_instance.items() for d in held}
        if forward != backward:
            raise InvariantBroken(f"prefix index is one-sided at {forward ^ backward}")


class TokenRates:
    """Tokens per canonical byte of prompt, and tokens of output, learned from usage."""

    def __init__(self, default: float, output_tokens: int, sessions_max: int) -> None:
        self._default = default
        self._output_default = float(output_tokens)
        self._outputs: dict[str, float] = {}
        self._models: dict[str, float] = {}
        self._sessions: Bounded[tuple[str, str, str], float] = Bounded(sessions_max)

    def observe(self, ended: CallEnded) -> None:
        """Learn from a finished call."""
        if ended.tail is None or not ended.tail.end_bytes or not ended.usage.prompt_tokens:
            return
        rate = ended.usage.prompt_tokens / ended.tail.end_bytes
        model = ended.grant.model
        before = self._models.get(model, rate)
        self._models[model] = before + RATE_WEIGHT * (rate - before)
        self._sessions.put((model, ended.tenant, ended.session), rate)

        mean = self._outputs.get(model, self._output_default)
        self._outputs[model] = mean + RATE_WEIGHT * (ended.usage.completion_tokens - mean)

    def output(self, model: str, limit: int) -> int:
        """Expected output tokens of a call with this limit (0: none): few use what they may."""
        mean = round(self._outputs.get(model, self._output_default))
        return max(1, min(limit or mean, mean))

    def rate(self, model: str, tenant: str, session: str | None) -> float:
        """Best guess, most specific first."""
        own = self._sessions.get((model, tenant, session)) if session is not None else None
        return own if own is not None else self._models.get(model, self._default)


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where a session's last call ran."""

    instance: str
    model: str


class Views:
    """Everything the router knows; each report is one method."""

    def __init__(self, *, tokens_per_byte: float, output_tokens: int, sessions_max: int) -> None:
        self.instances: dict[str, InstanceView] = {}
        self.models: set[str] = set()
        """Models that some instance has listed at some time."""
        self.prefixes = Prefixes()
        self.rates = TokenRates(tokens_per_byte, output_tokens, sessions_max)
        self.sessions: Bounded[tuple[str, str], SessionPlace] = Bounded(sessions_max)
        self._load = LoadState(epoch=0, version=0)
        self._loads: dict[str, InstanceLoad] = {}

    def hear(self, snapshot: Snapshot, now_s: float) -> None:
        """Take a snapshot, unless it is older than what is known or of a boot that is over."""
        view = self.instances.get(snapshot.instance)
        if view is None:
            view = self.instances[snapshot.instance] = InstanceView(snapshot, now_s)
        elif snapshot.boot_id in view.dead_boots:
            return
        elif snapshot.boot_id != view.snapshot.boot_id:
            view.dead_boots.append(view.snapshot.boot_id)
        elif snapshot.version < view.snapshot.version:
            return
        view.snapshot, view.heard_s, view.is_gone = snapshot, now_s, False
        view.models = {model.model: model for model in snapshot.models}
        self.models.update(view.models)
        self.prefixes.replace(snapshot.instance, snapshot.prefixes)

    def hear_load(self, load: LoadState) -> None:
        """Take admission's account; older epochs and versions are dropped."""
        if (load.epoch, load.version) < (self._load.epoch, self._load.version):
            return
        self._load = load
        self._loads = {entry.instance: entry for entry in load.instances}

    @property
    def load_version(self) -> int:
        return self._load.version

    def load(self, instance: str) -> InstanceLoad:
        return self._loads.get(instance) or InstanceLoad(instance=instance)

    def ended(self, ended: CallEnded) -> None:
        """A call is over: its prompt and reply are a prefix now, and its usage tells sizes."""
        self.rates.observe(ended)
        view = self.instances.get(ended.grant.instance)
        if view is None or view.snapshot.boot_id != ended.grant.boot_id:
            return
        if ended.prefix_tier not in REUSABLE:
            return
        tokens = ended.usage.prompt_tokens
        if ended.tail is not None:
            self.prefixes.add(
                view.instance, HeldPrefix(ended.tail.digest, tokens, ended.prefix_tier)
            )
        if ended.reply:
            tokens += ended.usage.completion_tokens
            self.prefixes.add(view.instance, HeldPrefix(ended.reply, tokens, ended.prefix_tier))

    def lost(self, instance: str, boot_id: str) -> None:
        """Nobody answers under the instance's name; its next snapshot brings it back."""
        view = self.instances.get(instance)
        if view is not None and view.snapshot.boot_id == boot_id:
            view.is_gone = True

    def forget(self, now_s: float, after_s: float) -> None:
        """Drop instances that have been silent for long, and what they held."""
        for view in list(self.instances.values()):
            if view.age_s(now_s) >= after_s:
                del self.instances[view.instance]
                self.prefixes.replace(view.instance, ())

    def check(self) -> None:
        """Raise InvariantBroken unless the tables agree."""
        self.prefixes.check()
