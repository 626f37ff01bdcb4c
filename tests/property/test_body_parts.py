"""Parts of several bodies, lost, repeated and in any order: a body comes back whole or not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from talaria_common.bodies import Assembler, digest_of
from talaria_common.wire import BodyPart, CallKey, Grant, RunCall

CALLS = 3
bodies = st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=4)


def a_run(key: CallKey, pieces: list[bytes]) -> RunCall:
    grant = Grant(epoch=1, n=1, key=key, instance="i", boot_id="b", model="m", charge_s=0)
    return RunCall(
        grant=grant,
        endpoint="chat",
        session="s",
        call_index=0,
        inbox="i",
        parts=len(pieces),
        digest=digest_of(b"".join(pieces)),
    )


@given(
    contents=st.lists(bodies, min_size=CALLS, max_size=CALLS),
    arrivals=st.lists(
        st.tuples(st.integers(0, CALLS - 1), st.integers(0, 3), st.floats(0, 4)), max_size=30
    ),
    bytes_max=st.integers(140, 1000),
)
def test_a_body_comes_back_whole_or_not_at_all(
    contents: list[list[bytes]], arrivals: list[tuple[int, int, float]], bytes_max: int
) -> None:
    assembler = Assembler(bytes_max=bytes_max, keep_s=10.0)
    now_s = 0.0
    for call, index, wait_s in arrivals:
        now_s += wait_s
        pieces = contents[call]
        if index < len(pieces):
            key = CallKey(f"c{call}")
            assembler.add(BodyPart(key=key, index=index, data=pieces[index]), now_s)
            assembler.check()
    for call, pieces in enumerate(contents):
        run = a_run(CallKey(f"c{call}"), pieces)
        assert assembler.take(run, now_s) in (b"".join(pieces), None)
        assert assembler.take(run, now_s) is None
        assembler.check()
    assembler.expire(now_s + 10.0)
    assert (assembler.calls, assembler.nbytes) == (0, 0)


@given(pieces=bodies, data=st.data())
def test_order_and_repeats_do_not_matter(pieces: list[bytes], data: st.DataObject) -> None:
    key = CallKey("c")
    order = data.draw(st.permutations([*range(len(pieces)), *range(len(pieces))]))
    assembler = Assembler()
    for index in order:
        assembler.add(BodyPart(key=key, index=index, data=pieces[index]), 0.0)
    assert assembler.take(a_run(key, pieces), 0.0) == b"".join(pieces)
    assert assembler.nbytes == 0
