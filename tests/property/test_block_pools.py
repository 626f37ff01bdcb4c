"""Random lives of KV blocks: no block is in two states, no bound is exceeded, nothing is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from talaria_instance.engine.torch.blocks import BlockPool
from talaria_instance.engine.torch.host import BlockName, HostBlock, HostPool

BLOCKS = 8
BLOCK_BYTES = 10
HOST_BLOCKS = 5
PREFIXES = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4)


class PoolLives(RuleBasedStateMachine):
    """Calls take, publish, share and give back blocks while copies hold pins."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.owned: list[list[int]] = []
        self.pinned: list[int] = []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        before = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is not None:
            taken = {b for own in self.owned for b in own} | set(self.pinned)
            assert not taken & set(blocks)
            self.owned.append(blocks)

    @rule(prefixes=PREFIXES)
    def share(self, prefixes: list[bytes]) -> None:
        expected = self.pool.cached_blocks(prefixes)
        blocks = self.pool.share(prefixes)
        assert len(blocks) == expected
        self.owned.append(blocks)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), prefix=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, prefix: bytes) -> None:
        own = data.draw(st.sampled_from([o for o in self.owned if o]))
        at = data.draw(st.integers(0, len(own) - 1))
        own[at] = self.pool.publish(own[at], prefix)
        assert self.pool.cached_blocks([prefix]) == 1

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for own in self.owned for b in own]))
        self.pool.pin(block)
        self.pinned.append(block)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.pool.unpin([self.pinned.pop()])

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check()
        owned = {b for own in self.owned for b in own}
        assert self.pool.unowned == BLOCKS - len(owned)
        assert self.pool.available == BLOCKS - len(owned | set(self.pinned))


class HostLives(RuleBasedStateMachine):
    """Copies are claimed, completed, pinned, dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.host: HostPool[bytearray] = HostPool(HOST_BLOCKS * BLOCK_BYTES, bytearray)
        self.pins: list[HostBlock[bytearray]] = []

    @rule(
        prefix=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]),
        is_shared=st.booleans(),
        size=st.integers(1, 2),
    )
    def claim(self, prefix: bytes, is_shared: bool, size: int) -> None:
        name = BlockName(
            model="m",
            prefix=prefix,
            parent=b"",
            index=0,
            tokens=4,
            session="",
            is_shared=is_shared,
        )
        claim = self.host.claim(name, size * BLOCK_BYTES)
        held = {id(b.buffer) for b in self.pins}
        if claim.block is None:
            assert sum(b.nbytes for b in set(self.pins)) + size * BLOCK_BYTES > 50
            return
        assert claim.is_new != (id(claim.block.buffer) in held or claim.block.is_complete)
        self.pins.append(claim.block)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.host.complete(data.draw(st.sampled_from(self.pins)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.host.unpin([self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))])

    @rule(prefixes=PREFIXES)
    def drop(self, prefixes: list[bytes]) -> None:
        pinned = {b.name.prefix for b in self.pins if b.name.is_shared}
        assert not pinned & set(self.host.drop(prefixes))

    @invariant()
    def is_bounded(self) -> None:
        self.host.check()
        assert self.host.nbytes >= sum(b.nbytes for b in set(self.pins))


TestPoolLives = PoolLives.TestCase
TestPoolLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostLives = HostLives.TestCase
TestHostLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
