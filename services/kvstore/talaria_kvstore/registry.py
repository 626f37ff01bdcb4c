"""Which instance holds which KV prefix in host memory. Pure.

A prefix is one aligned block, named by the cumulative hash of everything up to it; its parent is
the block before. What an instance says of itself is believed for one life (boot id) of it; events
may come twice. Totals are kept along and `check` compares them with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from talaria_common.errors import InvariantBroken
from talaria_common.wire import KvEntry
from talaria_kvstore.retention import Candidate

RETIRED_MAX: Final = 16
"""Earlier boot ids remembered per instance, so that their late events are known as such."""


@dataclass
class Holding:
    """One instance's copy of a prefix."""

    nbytes: int
    last_use_s: float
    asked_s: float | None = None
    """When its eviction was last asked for."""
    asks: int = 0


@dataclass
class Prefix:
    """A block that at least one instance holds."""

    model: str
    parent: bytes
    holders: dict[str, Holding] = field(default_factory=dict)


@dataclass
class Holder:
    """An instance, in its present life."""

    boot_id: str
    heard_s: float
    prefixes: set[bytes] = field(default_factory=set)
    nbytes: int = 0
    asked_bytes: int = 0
    """Bytes whose eviction is under way."""
    retired: list[str] = field(default_factory=list)


class Registry:
    """The node's host KV by prefix and by instance."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, Prefix] = {}
        self._holders: dict[str, Holder] = {}

    # --- events ---

    def hear(self, instance: str, boot_id: str, now_s: float) -> bool:
        """Note a sign of life; False if it is from an earlier life, whose claims are void.

        A new boot id voids everything that the instance held before.
        """
        holder = self._holders.get(instance)
        if holder is None:
            self._holders[instance] = Holder(boot_id, now_s)
            return True
        if boot_id in holder.retired:
            return False
        if boot_id != holder.boot_id:
            self.clear(instance)
            holder.retired = [*holder.retired, holder.boot_id][-RETIRED_MAX:]
            holder.boot_id = boot_id
        holder.heard_s = max(holder.heard_s, now_s)
        return True

    def save(self, instance: str, entries: Sequence[KvEntry], now_s: float) -> None:
        """Add prefixes that a known instance now holds."""
        holder = self._holders[instance]
        for entry in entries:
            prefix = self._prefixes.setdefault(entry.prefix, Prefix(entry.model, entry.parent))
            if instance in prefix.holders:
                self._remove(instance, entry.prefix, keep=True)
            prefix.holders[instance] = Holding(entry.nbytes, now_s)
            holder.prefixes.add(entry.prefix)
            holder.nbytes += entry.nbytes

    def drop(self, instance: str, prefixes: Sequence[bytes]) -> int:
        """Remove prefixes that an instance no longer holds; returns how many it was thought to."""
        held = self._holders[instance].prefixes
        gone = [prefix for prefix in dict.fromkeys(prefixes) if prefix in held]
        for prefix in gone:
            self._remove(instance, prefix)
        return len(gone)

    def clear(self, instance: str) -> None:
        """Remove everything that an instance holds."""
        for prefix in list(self._holders[instance].prefixes):
            self._remove(instance, prefix)

    def forget_silent(self, now_s: float, forget_s: float) -> list[str]:
        """Forget the instances that were not heard of for `forget_s`, with all they held."""
        silent = [i for i, h in self._holders.items() if now_s - h.heard_s > forget_s]
        for instance in silent:
            self.clear(instance)
            del self._holders[instance]
        return silent

    # --- evictions ---

    def ask(self, chosen: Sequence[Candidate], now_s: float) -> None:
        """Note that evictions were asked for."""
        for candidate in chosen:
            holding = self._prefixes[candidate.prefix].holders[candidate.instance]
            if holding.asked_s is None:
                self._holders[candidate.instance].asked_bytes += holding.nbytes
            holding.asked_s = now_s
            holding.asks += 1

    def expire_asks(self, now_s: float, retry_s: float, tries: int) -> int:
        """Take back evictions that went unconfirmed for `retry_s`; returns how many holdings went.

        A holding is disbelieved once it was asked for `tries` times.
        """
        late = [
            (instance, prefix)
            for instance, prefix, holding in self._holdings()
            if holding.asked_s is not None and now_s - holding.asked_s > retry_s
        ]
        disbelieved = 0
        for instance, prefix in late:
            holding = self._prefixes[prefix].holders[instance]
            if holding.asks >= tries:
                self._remove(instance, prefix)
                disbelieved += 1
            else:
                self._unask(instance, holding)
        return disbelieved

    def candidates(self, now_s: float, silent_s: float) -> Iterator[Candidate]:
        """What could be evicted from the instances that are there and was not asked for yet."""
        for instance, prefix, holding in self._holdings():
            if holding.asked_s is None and self._is_there(instance, now_s, silent_s):
                yield Candidate(
                    instance=instance,
                    prefix=prefix,
                    parent=self._prefixes[prefix].parent,
                    nbytes=holding.nbytes,
                    last_use_s=holding.last_use_s,
                )

    # --- questions ---

    def lookup(
        self, model: str, prefixes: Sequence[bytes], now_s: float, silent_s: float
    ) -> dict[str, int]:
        """Leading blocks of a chain that each instance can restore; instances with none are left out."""
        return {
            instance: blocks
            for instance in self._holders
            if self._is_there(instance, now_s, silent_s)
            and (blocks := self._leading(instance, model, prefixes))
        }

    def bytes_by_instance(self, now_s: float, silent_s: float) -> dict[str, int]:
        """Bytes that the instances that are there hold."""
        return {
            instance: holder.nbytes
            for instance, holder in self._holders.items()
            if self._is_there(instance, now_s, silent_s)
        }

    def staying_bytes(self, now_s: float, silent_s: float) -> int:
        """Bytes that are held, less those whose eviction is under way."""
        return sum(
            holder.nbytes - holder.asked_bytes
            for instance, holder in self._holders.items()
            if self._is_there(instance, now_s, silent_s)
        )

    @property
    def entries(self) -> int:
        """Prefixes that anybody holds."""
        return len(self._prefixes)

    def check(self) -> None:
        """Raise InvariantBroken if the totals disagree with the tables."""
        for instance, holder in self._holders.items():
            holdings = [h for i, _, h in self._holdings() if i == instance]
            if holder.nbytes != sum(h.nbytes for h in holdings):
                raise InvariantBroken(f"bytes of {instance} do not add up")
            if holder.asked_bytes != sum(h.nbytes for h in holdings if h.asked_s is not None):
                raise InvariantBroken(f"asked bytes of {instance} do not add up")
            if len(holder.prefixes) != len(holdings):
                raise InvariantBroken(f"prefixes of {instance} do not add up")
        if any(not prefix.holders for prefix in self._prefixes.values()):
            raise InvariantBroken("a prefix that nobody holds is listed")

    # --- tables ---

    def _holdings(self) -> Iterator[tuple[str, bytes, Holding]]:
        for name, prefix in self._prefixes.items():
            for instance, holding in prefix.holders.items():
                yield instance, name, holding

    def _is_there(self, instance: str, now_s: float, silent_s: float) -> bool:
        return now_s - self._holders[instance].heard_s <= silent_s

    def _leading(self, instance: str, model: str, prefixes: Sequence[bytes]) -> int:
        for n, name in enumerate(prefixes):
            prefix = self._prefixes.get(name)
            if prefix is None or prefix.model != model or instance not in prefix.holders:
                return n
        return len(prefixes)

    def _remove(self, instance: str, name: bytes, *, keep: bool = False) -> None:
        """Take a holding out of the totals; the prefix too if it was the last and not `keep`."""
        prefix, holder = self._prefixes[name], self._holders[instance]
        holding = prefix.holders.pop(instance)
        self._unask(instance, holding)
        holder.nbytes -= holding.nbytes
        holder.prefixes.discard(name)
        if not prefix.holders and not keep:
            del self._prefixes[name]

    def _unask(self, instance: str, holding: Holding) -> None:
        if holding.asked_s is not None:
            self._holders[instance].asked_bytes -= holding.nbytes
            holding.asked_s = None
