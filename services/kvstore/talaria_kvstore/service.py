"""The kvstore on the bus: hears what instances hold, answers lookups, asks for evictions. IO.

The bytes stay in the instances' host pools; here is who holds what, and what has to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import assert_never

from talaria_common import subjects, wire
from talaria_common.bus import BusDown, Msg, Subscription
from talaria_common.service import Context
from talaria_kvstore.config import KvstoreConfig
from talaria_kvstore.registry import Registry
from talaria_kvstore.retention import choose_evictions

_log = logging.getLogger(__name__)

BACKEND = "instances"
"""Where the bytes are."""
QUEUE = "kvstore"


class KvstoreService:
    """The node's registry of host KV."""

    def __init__(self, context: Context, config: KvstoreConfig) -> None:
        self._bus = context.bus
        self._clock = context.clock
        self._config = config
        self._registry = Registry()
        self._evicted = 0
        self._subscriptions: list[Subscription] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._known: set[str] = set()
        metrics = context.telemetry.metrics
        self._entries_gauge = metrics.gauge(
            "talaria_kv_entries", "KV prefixes held on hosts, each counted once"
        )
        self._bytes_gauge = metrics.gauge(
            "talaria_kv_bytes", "Host KV of an instance, in bytes", ("instance",)
        )
        self._evictions = metrics.counter(
            "talaria_kv_evictions", "Prefixes that the retention had evicted"
        )
        self._dropped_events = metrics.counter(
            "talaria_kv_events_dropped", "Messages not taken into account", ("cause",)
        )

    async def start(self) -> None:
        """Subscribe; ready when others' messages arrive."""
        for subject, handler, queue in (
            (subjects.ANY_KV, self._on_event, ""),
            (subjects.ANY_SNAPSHOT, self._on_snapshot, ""),
            (subjects.KVSTORE, self._on_query, QUEUE),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, handler, queue=queue))
        await self._bus.barrier()
        self._sweeper = asyncio.create_task(self._sweep(), name="kvstore-sweep")

    async def drain(self) -> None:
        """Nothing outlives a handler: the same as `stop`."""
        await self.stop()

    async def stop(self) -> None:
        """Leave the bus; idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()

    # --- messages ---

    async def _on_event(self, msg: Msg) -> None:
        event = wire.decode(wire.KV_EVENT, msg.payload)
        if event is None:
            self._dropped_events.labels("unreadable").inc()
            return
        now_s = self._clock.now_s()
        if not self._registry.hear(event.instance, event.boot_id, now_s):
            self._dropped_events.labels("earlier_life").inc()
            return
        match event:
            case wire.KvSaved():
                self._registry.save(event.instance, event.entries, now_s)
            case wire.KvDropped(is_all=True):
                self._registry.clear(event.instance)
            case wire.KvDropped():
                self._registry.drop(event.instance, event.prefixes)
            case _:
                assert_never(event)
        await self._evict()
        self._measure()

    async def _on_snapshot(self, msg: Msg) -> None:
        snapshot = wire.decode(wire.SNAPSHOT, msg.payload)
        if snapshot is None:
            self._dropped_events.labels("unreadable").inc()
        elif not self._registry.hear(snapshot.instance, snapshot.boot_id, self._clock.now_s()):
            self._dropped_events.labels("earlier_life").inc()

    async def _on_query(self, msg: Msg) -> None:
        query = wire.decode(wire.KV_QUERY, msg.payload)
        if query is None or not msg.reply:
            self._dropped_events.labels("unreadable").inc()
            return
        answer: wire.Message
        now_s, silent_s = self._clock.now_s(), self._config.silent_s
        match query:
            case wire.KvLookup():
                found = self._registry.lookup(query.model, query.prefixes, now_s, silent_s)
                answer = wire.KvFound(blocks_by_instance=found)
            case wire.KvStats():
                by_instance = self._registry.bytes_by_instance(now_s, silent_s)
                answer = wire.KvStats(
                    backend=BACKEND,
                    entries=self._registry.entries,
                    nbytes=sum(by_instance.values()),
                    budget_bytes=self._config.budget_bytes,
                    evicted=self._evicted,
                    by_instance=by_instance,
                )
            case _:
                assert_never(query)
        await self._bus.publish(msg.reply, wire.encode(answer))

    # --- retention ---

    async def _sweep(self) -> None:
        config = self._config
        while True:
            await asyncio.sleep(config.sweep_s)
            now_s = self._clock.now_s()
            for instance in self._registry.forget_silent(now_s, config.forget_s):
                _log.info("%s has gone silent: what it held is forgotten", instance)
            if lost := self._registry.expire_asks(now_s, config.evict_retry_s, config.evict_tries):
                _log.warning("%d prefixes were never confirmed as evicted", lost)
            await self._evict()
            self._measure()

    async def _evict(self) -> None:
        """Ask instances to drop what the budget has no room for."""
        config, now_s = self._config, self._clock.now_s()
        held_bytes = self._registry.staying_bytes(now_s, config.silent_s)
        if held_bytes <= config.budget_bytes:
            return
        excess_bytes = held_bytes - int(config.budget_bytes * config.evict_to_share)
        candidates = self._registry.candidates(now_s, config.silent_s)
        chosen = choose_evictions(candidates, excess_bytes)
        # All are noted before the first await: another event may come in between.
        self._registry.ask(chosen, now_s)
        self._evicted += len(chosen)
        self._evictions.inc(len(chosen))
        by_instance: defaultdict[str, list[bytes]] = defaultdict(list)
        for candidate in chosen:
            by_instance[candidate.instance].append(candidate.prefix)
        for instance, prefixes in by_instance.items():
            for start in range(0, len(prefixes), config.evict_batch):
                await self._send(instance, prefixes[start : start + config.evict_batch])

    async def _send(self, instance: str, prefixes: list[bytes]) -> None:
        # While the bus is down the asks stand and are repeated after `evict_retry_s`.
        with contextlib.suppress(BusDown):
            message = wire.EvictKv(prefixes=tuple(prefixes))
            await self._bus.publish(subjects.instance_kv(instance), wire.encode(message))

    def _measure(self) -> None:
        by_instance = self._registry.bytes_by_instance(self._clock.now_s(), self._config.silent_s)
        self._entries_gauge.set(self._registry.entries)
        for instance in self._known - by_instance.keys():
            self._bytes_gauge.remove(instance)
        for instance, nbytes in by_instance.items():
            self._bytes_gauge.labels(instance).set(nbytes)
        self._known = set(by_instance)
