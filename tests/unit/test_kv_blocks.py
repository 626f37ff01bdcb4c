"""The device block pool and the host pool of the torch engine."""

from __future__ import annotations

import pytest

from talaria_common.errors import InvariantBroken
from talaria_instance.engine.torch.blocks import BlockPool, extend_chain, root_digest
from talaria_instance.engine.torch.host import BlockName, HostBlock, HostPool

SIZE = 4


def chain_of(tokens: list[int], tenant: str = "", model: bytes = b"m") -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, root_digest(tenant, model), tokens, SIZE)
    return digests


# --- digests ------------------------------------------------------------------------------------


def test_a_digest_names_everything_before_it() -> None:
    one, two = chain_of([1, 2, 3, 4, 5, 6, 7, 8]), chain_of([0, 2, 3, 4, 5, 6, 7, 8])
    assert len(one) == 2
    assert one[0] != two[0]
    assert one[1] != two[1]


def test_a_partial_block_has_no_digest() -> None:
    assert chain_of([1, 2, 3, 4, 5, 6, 7]) == chain_of([1, 2, 3, 4])


def test_a_chain_grows_as_it_would_have_been_made_at_once() -> None:
    digests = chain_of([1, 2, 3, 4])
    extend_chain(digests, root_digest("", b"m"), [1, 2, 3, 4, 5, 6, 7, 8], SIZE)
    assert digests == chain_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_tenants_and_models_share_no_digest() -> None:
    tokens = [1, 2, 3, 4]
    digests = [
        *chain_of(tokens),
        *chain_of(tokens, tenant="a"),
        *chain_of(tokens, tenant="am", model=b""),
        *chain_of(tokens, model=b"n"),
        *chain_of(tokens, tenant="a", model=b"m"),
    ]
    assert len(set(digests)) == 4, "only the last and the second are the same"
    assert digests[1] == digests[4]


# --- device -------------------------------------------------------------------------------------


def a_pool(total: int, chain: str = "") -> BlockPool:
    """A pool in which a finished call has left one block for each letter of `chain`."""
    pool = BlockPool(total)
    blocks = pool.allocate(len(chain)) or []
    for block, letter in zip(blocks, chain, strict=True):
        pool.publish(block, letter.encode())
    pool.release(blocks)
    return pool


def letters(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_blocks_are_handed_out_from_the_low_end() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    pool.release([0])
    assert pool.allocate(2) == [0, 2]
    pool.check()


def test_too_large_a_wish_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.available == 1


def test_a_finished_prefix_is_shared_up_to_the_first_gap() -> None:
    pool = a_pool(6, "abc")
    assert pool.cached_blocks(letters("abx")) == 2
    assert pool.share(letters("abx")) == [0, 1]
    assert pool.share(letters("xbc")) == []
    assert pool.unowned == 4
    pool.check()


def test_a_shared_block_goes_with_its_last_owner() -> None:
    pool = a_pool(1, "a")
    pool.share(letters("a"))
    pool.share(letters("a"))
    pool.release([0])
    assert pool.allocate(1) is None
    pool.release([0])
    assert pool.allocate(1) == [0]


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    pool = a_pool(3, "abc")
    assert pool.allocate(1) == [2]
    assert pool.cached_blocks(letters("abc")) == 2


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = a_pool(4, "ab")
    later = pool.allocate(2) or []
    pool.publish(later[0], b"x")
    pool.publish(later[1], b"y")
    pool.release(later)
    pool.release(pool.share(letters("ab")))
    pool.allocate(2)
    assert pool.cached_blocks(letters("ab")) == 2
    assert pool.cached_blocks(letters("xy")) == 0
    pool.check()


def test_a_prefix_that_two_calls_computed_is_kept_once() -> None:
    pool = a_pool(3, "a")
    (mine,) = pool.allocate(1) or []
    assert pool.publish(mine, b"a") == 0
    assert pool.unowned == 2
    assert pool.allocate(2) is not None, "the duplicate is free again"
    pool.check()


def test_a_pinned_block_is_not_handed_out_until_its_copy_has_ended() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.pin(0)
    pool.release([0])
    assert pool.allocate(1) is None
    assert pool.is_pinned
    assert pool.unowned == 1
    pool.unpin([0])
    assert pool.allocate(1) == [0]


def test_a_pinned_block_can_be_shared_again() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a")
    pool.pin(block)
    pool.release([block])
    assert pool.share([b"a"]) == [block]
    pool.unpin([block])
    pool.check()


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(InvariantBroken):
        pool.release([0])


# --- host ---------------------------------------------------------------------------------------

BLOCK_BYTES = 10


def a_host(blocks: int) -> HostPool[bytearray]:
    return HostPool(blocks * BLOCK_BYTES, bytearray)


def a_name(prefix: str, *, is_shared: bool = True) -> BlockName:
    return BlockName(
        model="m",
        prefix=prefix.encode(),
        parent=b"",
        index=0,
        tokens=SIZE,
        session="s",
        is_shared=is_shared,
    )


def keep(host: HostPool[bytearray], prefixes: str) -> list[HostBlock[bytearray]]:
    """Save a finished call's chain, one block for each letter."""
    blocks = []
    for prefix in prefixes:
        block = host.claim(a_name(prefix), BLOCK_BYTES).block
        assert block is not None
        host.complete(block)
        blocks.append(block)
    host.unpin(blocks)
    return blocks


def test_a_copy_is_not_seen_before_it_is_complete() -> None:
    host = a_host(2)
    block = host.claim(a_name("a"), BLOCK_BYTES).block
    assert block is not None
    assert host.held_blocks([b"a"]) == 0
    assert host.pin(b"a") is None
    host.complete(block)
    assert host.held_blocks([b"a"]) == 1
    assert host.pin(b"a") is block


def test_a_private_copy_is_seen_by_nobody_and_goes_with_its_call() -> None:
    host = a_host(2)
    block = host.claim(a_name("a", is_shared=False), BLOCK_BYTES).block
    assert block is not None
    host.complete(block)
    assert host.pin(b"a") is None
    assert host.nbytes == BLOCK_BYTES
    host.unpin([block])
    assert host.nbytes == 0


def test_a_prefix_is_copied_once() -> None:
    host = a_host(2)
    first, second = (host.claim(a_name("a"), BLOCK_BYTES) for _ in range(2))
    assert (first.is_new, second.is_new) == (True, False)
    assert first.block is second.block
    assert host.nbytes == BLOCK_BYTES


def test_the_bound_holds_by_dropping_the_least_recently_used_end_first() -> None:
    host = a_host(3)
    keep(host, "abc")
    claim = host.claim(a_name("x"), BLOCK_BYTES)
    assert claim.dropped == (b"c",)
    assert claim.is_new
    assert host.held_blocks([b"a", b"b", b"c"]) == 2
    host.check()


def test_without_room_there_is_no_copy() -> None:
    host = a_host(1)
    assert host.claim(a_name("a"), BLOCK_BYTES).is_new
    claim = host.claim(a_name("b"), BLOCK_BYTES)
    assert (claim.block, claim.dropped) == (None, ())


def test_a_pinned_copy_is_not_dropped() -> None:
    host = a_host(2)
    keep(host, "ab")
    pinned = host.pin(b"a")
    assert pinned is not None
    assert host.drop([b"a", b"b", b"never"]) == [b"b"]
    host.unpin([pinned])
    assert host.drop([b"a"]) == [b"a"]


def test_a_copy_that_never_got_complete_goes_with_its_last_pin() -> None:
    host = a_host(1)
    block = host.claim(a_name("a"), BLOCK_BYTES).block
    assert block is not None
    host.unpin([block])
    assert host.nbytes == 0
    assert host.claim(a_name("a"), BLOCK_BYTES).is_new


def test_buffers_of_one_size_make_room_for_another() -> None:
    host = a_host(2)
    keep(host, "ab")
    host.drop([b"a", b"b"])
    claim = host.claim(a_name("x"), 2 * BLOCK_BYTES)
    assert claim.block is not None
    assert len(claim.block.buffer) == 2 * BLOCK_BYTES
    host.check()
