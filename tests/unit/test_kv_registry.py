"""Who holds which KV prefix, by what instances say of themselves."""

from __future__ import annotations

import pytest

from talaria_common.wire import KvEntry
from talaria_kvstore.registry import Registry
from talaria_kvstore.retention import choose_evictions

SILENT_S = 5.0
CHAIN = (b"a", b"ab", b"abc")


def entry(prefix: bytes, *, model: str = "m", nbytes: int = 10) -> KvEntry:
    return KvEntry(
        prefix=prefix,
        parent=prefix[:-1],
        model=model,
        tokens=16 * len(prefix),
        nbytes=nbytes,
    )


@pytest.fixture
def registry() -> Registry:
    """i-1 holds the whole chain, i-2 its first block; both were heard at 0 s."""
    registry = Registry()
    registry.hear("i-1", "boot-1", 0.0)
    registry.hear("i-2", "boot-2", 0.0)
    registry.save("i-1", [entry(p) for p in CHAIN], 0.0)
    registry.save("i-2", [entry(b"a")], 0.0)
    return registry


def found(
    registry: Registry, *chain: bytes, model: str = "m", now_s: float = 1.0
) -> dict[str, int]:
    registry.check()
    return registry.lookup(model, chain, now_s, SILENT_S)


def test_lookup_tells_the_leading_blocks_of_each_instance(registry: Registry) -> None:
    assert found(registry, *CHAIN, b"abcd") == {"i-1": 3, "i-2": 1}


def test_a_gap_ends_a_restorable_prefix(registry: Registry) -> None:
    registry.drop("i-1", [b"ab"])
    assert found(registry, *CHAIN) == {"i-1": 1, "i-2": 1}


def test_another_model_finds_nothing(registry: Registry) -> None:
    assert found(registry, *CHAIN, model="n") == {}


def test_a_save_told_twice_counts_once(registry: Registry) -> None:
    registry.save("i-1", [entry(b"a")], 1.0)
    assert registry.bytes_by_instance(1.0, SILENT_S) == {"i-1": 30, "i-2": 10}
    assert registry.entries == 3


def test_a_drop_told_twice_counts_once(registry: Registry) -> None:
    assert registry.drop("i-1", [b"abc", b"abc", b"unknown"]) == 1
    assert registry.drop("i-1", [b"abc"]) == 0
    assert registry.bytes_by_instance(1.0, SILENT_S)["i-1"] == 20


def test_a_new_boot_id_voids_what_the_instance_held(registry: Registry) -> None:
    assert registry.hear("i-1", "boot-3", 1.0)
    assert found(registry, *CHAIN) == {"i-2": 1}


def test_a_late_word_of_an_earlier_life_is_told_apart(registry: Registry) -> None:
    registry.hear("i-1", "boot-3", 1.0)
    assert not registry.hear("i-1", "boot-1", 2.0)
    assert registry.hear("i-1", "boot-3", 2.0)


def test_a_silent_instance_restores_nothing_until_it_speaks_again(registry: Registry) -> None:
    registry.hear("i-2", "boot-2", 8.0)
    assert found(registry, b"a", now_s=8.0) == {"i-2": 1}
    assert registry.staying_bytes(8.0, SILENT_S) == 10
    registry.hear("i-1", "boot-1", 8.0)
    assert found(registry, b"a", now_s=8.0) == {"i-1": 1, "i-2": 1}


def test_an_instance_silent_for_long_is_forgotten(registry: Registry) -> None:
    registry.hear("i-2", "boot-2", 50.0)
    assert registry.forget_silent(61.0, 60.0) == ["i-1"]
    assert registry.entries == 1
    registry.check()


def test_an_eviction_under_way_is_not_asked_for_again(registry: Registry) -> None:
    chosen = choose_evictions(registry.candidates(1.0, SILENT_S), 10)
    registry.ask(chosen, 1.0)
    assert registry.staying_bytes(1.0, SILENT_S) == 30
    left = {(c.instance, c.prefix) for c in registry.candidates(1.0, SILENT_S)}
    assert not left & {(c.instance, c.prefix) for c in chosen}
    registry.check()


def test_an_unconfirmed_eviction_is_a_candidate_again_and_then_disbelieved(
    registry: Registry,
) -> None:
    for now_s, disbelieved in ((0.0, 0), (10.0, 1)):
        leaf = [c for c in registry.candidates(now_s, 100.0) if c.prefix == b"abc"]
        assert len(leaf) == 1
        registry.ask(leaf, now_s)
        assert registry.expire_asks(now_s + 4.0, 5.0, 2) == 0
        assert registry.expire_asks(now_s + 6.0, 5.0, 2) == disbelieved
    assert found(registry, *CHAIN) == {"i-1": 2, "i-2": 1}
