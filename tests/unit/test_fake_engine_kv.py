"""The fake engine's device cache and host pool."""

from __future__ import annotations

from talaria_instance.engine.fake_kv import (
    DeviceCache,
    HostPool,
    extend_hashes,
    held_blocks,
    root_hash,
)
from talaria_instance.engine.protocol import KvBlock


def block(name: str) -> KvBlock:
    return KvBlock(
        prefix=name.encode(),
        parent=name[:-1].encode(),
        model="m",
        tokens=16 * len(name),
        nbytes=10,
        session="s",
    )


def chain(name: str) -> list[KvBlock]:
    return [block(name[:n]) for n in range(1, len(name) + 1)]


def test_hashes_are_cumulative_and_apart_by_model_and_tenant() -> None:
    def hashes(root: bytes, tokens: bytes) -> list[bytes]:
        found: list[bytes] = []
        extend_hashes(root, found, tokens, len(tokens) // 8, 2)
        return found

    mine = hashes(root_hash("m", "t"), b"aaaabbbb" * 3)
    assert len(set(mine)) == 3
    longer = hashes(root_hash("m", "t"), b"aaaabbbb" * 3 + b"ccccdddd")
    assert longer[:3] == mine
    for other in (root_hash("n", "t"), root_hash("m", "u")):
        assert not set(hashes(other, b"aaaabbbb" * 3)) & set(mine)


def test_only_the_unbroken_start_of_a_chain_is_held() -> None:
    assert held_blocks([b"a", b"b", b"c"], {b"a", b"c"}) == 1
    assert held_blocks([], {b"a"}) == 0


def test_blocks_in_use_survive_a_trim_and_leaves_go_first() -> None:
    cache = DeviceCache()
    cache.take([b"a", b"ab", b"abc"])
    cache.take([b"a"])
    cache.trim(0)
    assert b"abc" in cache
    cache.release([b"a", b"ab", b"abc"])
    cache.trim(1)
    assert [name for name in (b"a", b"ab", b"abc") if name in cache] == [b"a", b"ab"]
    cache.release([b"a"])
    cache.trim(0)
    assert b"a" not in cache


def test_a_full_pool_evicts_the_least_recently_used_leaf() -> None:
    pool = HostPool(40)
    pool.save(chain("abc"))
    added, evicted = pool.save(chain("ax"))
    assert ([b.prefix for b in added], evicted) == ([b"ax"], [])
    added, evicted = pool.save(chain("ay"))
    assert evicted == [b"abc"]
    assert (b"a" in pool, b"ab" in pool, pool.nbytes) == (True, True, 40)


def test_a_chain_larger_than_the_pool_is_kept_in_part() -> None:
    pool = HostPool(25)
    added, evicted = pool.save(chain("abcd"))
    assert ([b.prefix for b in added], evicted, pool.nbytes) == ([b"a", b"ab"], [], 20)


def test_dropping_a_block_drops_what_it_leads_to() -> None:
    pool = HostPool(1000)
    pool.save(chain("abcd"))
    pool.save(chain("abx"))
    assert sorted(pool.drop([b"abc", b"unknown"])) == [b"abc", b"abcd"]
    assert sorted(pool.drop([b"a"])) == [b"a", b"ab", b"abx"]
    assert pool.nbytes == 0
