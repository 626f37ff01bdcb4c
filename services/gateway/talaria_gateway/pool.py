"""The gateway's view of the instances: what their snapshots say, and how old that is. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from talaria_common.wire import CallKey, ModelState, Residency, Snapshot

FRESH_S: Final = 1.5
"""Three heartbeats; an older snapshot is stale (protocols 2)."""
GONE_S: Final = 5.0
"""Without a snapshot for so long an instance is gone."""
FORGET_S: Final = 60.0
"""Silence after which an instance is forgotten, once another one comes."""
MODELS_MAX: Final = 1024


class Heard(msgspec.Struct, frozen=True):
    """The last snapshot of an instance and when it came."""

    snapshot: Snapshot
    at_s: float
    live: frozenset[CallKey]
    """The attempts that it lists."""


class ModelGauges(msgspec.Struct, frozen=True):
    """Calls of one model that the live instances hold."""

    running: int
    waiting: int


class Pool:
    """All instances that have spoken, by name."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}
        self._models: dict[str, int] = {}

    def hear(self, snapshot: Snapshot, now_s: float) -> None:
        """Take a snapshot; one of the same boot that is older than the last is ignored."""
        last = self._heard.get(snapshot.instance)
        is_same_boot = last is not None and last.snapshot.boot_id == snapshot.boot_id
        if last is not None and is_same_boot and snapshot.version < last.snapshot.version:
            return
        if last is None:
            self._heard = {n: h for n, h in self._heard.items() if now_s - h.at_s < FORGET_S}
        live = frozenset(entry.grant.key for entry in snapshot.live_grants)
        self._heard[snapshot.instance] = Heard(snapshot, now_s, live)
        for state in snapshot.models:
            if state.model in self._models or len(self._models) < MODELS_MAX:
                known = self._models.get(state.model, 0)
                self._models[state.model] = state.max_model_len or known

    def age_s(self, instance: str, now_s: float) -> float:
        """Seconds since the last snapshot; infinite for an instance that is not known."""
        last = self._heard.get(instance)
        return math.inf if last is None else now_s - last.at_s

    def listed_s(self, instance: str, key: CallKey) -> float:
        """When the last snapshot of the instance came, if it lists the attempt; else long ago."""
        last = self._heard.get(instance)
        return last.at_s if last is not None and key in last.live else -math.inf

    def has_restarted(self, instance: str, boot_id: str) -> bool:
        """Another boot of the instance has spoken last."""
        last = self._heard.get(instance)
        return last is not None and last.snapshot.boot_id != boot_id

    def forget(self, instance: str) -> None:
        """The instance is known to be gone."""
        self._heard.pop(instance, None)

    def ready(self, now_s: float) -> list[str]:
        """Instances with a fresh snapshot that take calls."""
        return [
            name
            for name, heard in sorted(self._heard.items())
            if now_s - heard.at_s <= FRESH_S
            and heard.snapshot.is_ready
            and not heard.snapshot.is_draining
        ]

    def models(self) -> dict[str, int]:
        """Context in tokens of every model heard of, in the order of the catalogue.

        A model stays listed while its instances are away: it is not unknown then, only not to be had.
        """
        return dict(self._models)

    def residency(self, model: str, now_s: float) -> dict[str, Residency]:
        """Where the model's weights are on each instance that is not gone."""
        return {
            name: state.residency
            for name, heard in sorted(self._heard.items())
            if now_s - heard.at_s <= GONE_S
            for state in heard.snapshot.models
            if state.model == model
        }

    def engines(self, model: str) -> str:
        """Engines that serve the model, joined by commas; of the last snapshots heard."""
        names = {
            heard.snapshot.engine
            for heard in self._heard.values()
            if any(state.model == model for state in heard.snapshot.models)
        }
        return ", ".join(sorted(names - {""}))

    def gauges(self, held: Mapping[str, int], now_s: float) -> dict[str, ModelGauges]:
        """Calls running and waiting per model, over all instances that are not gone.

        `held`: accepted calls per model that this gateway knows of; those that no snapshot shows
        yet count as running.
        """
        totals: dict[str, ModelGauges] = {model: ModelGauges(0, 0) for model in self._models}
        for heard in self._heard.values():
            if now_s - heard.at_s > GONE_S:
                continue
            for state in heard.snapshot.models:
                totals[state.model] = _added(totals.get(state.model), state)
        for model, count in held.items():
            shown = totals.get(model, ModelGauges(0, 0))
            unseen = max(0, count - shown.running - shown.waiting)
            totals[model] = ModelGauges(shown.running + unseen, shown.waiting)
        return totals


class Held:
    """Accepted calls per model. One that is over is counted for 0.25 s more: snapshots come at
    most ten a second, and a call between two of them should not escape every scrape.
    """

    LINGER_S: Final = 0.25

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._over: deque[tuple[float, str]] = deque()

    def add(self, model: str) -> None:
        self._counts[model] = self._counts.get(model, 0) + 1

    def drop(self, model: str, now_s: float) -> None:
        self._over.append((now_s + self.LINGER_S, model))
        self.counts(now_s)

    def counts(self, now_s: float) -> dict[str, int]:
        """Calls held now."""
        while self._over and self._over[0][0] <= now_s:
            self._counts[self._over.popleft()[1]] -= 1
        return self._counts


def _added(total: ModelGauges | None, state: ModelState) -> ModelGauges:
    before = total or ModelGauges(0, 0)
    return ModelGauges(before.running + state.calls_running, before.waiting + state.calls_waiting)
