"""Large bodies in parts."""

from __future__ import annotations

import pytest

from talaria_common.bodies import INLINE_BYTES_MAX, PART_OVERHEAD_BYTES, Assembler, split
from talaria_common.wire import BodyPart, CallKey, Grant, RunCall

KEY = CallKey("c1", 1)


def a_run(key: CallKey, body: bytes, parts: int, digest: bytes) -> RunCall:
    grant = Grant(epoch=1, n=1, key=key, instance="i-1", boot_id="b", model="m", charge_s=0.1)
    return RunCall(
        grant=grant,
        endpoint="chat",
        session="s",
        call_index=0,
        inbox="_INBOX.x.1.1",
        body=body,
        parts=parts,
        digest=digest,
    )


def a_body(nbytes: int) -> bytes:
    return bytes(n % 251 for n in range(nbytes))


@pytest.mark.parametrize("nbytes", [0, 1, INLINE_BYTES_MAX])
def test_a_small_body_travels_inline(nbytes: int) -> None:
    inline, parts, digest = split(KEY, a_body(nbytes))
    assert (inline, parts, digest) == (a_body(nbytes), (), b"")
    assert Assembler().take(a_run(KEY, inline, 0, b""), 0.0) == a_body(nbytes)


@pytest.mark.parametrize(("extra", "count"), [(1, 2), (INLINE_BYTES_MAX, 2)])
def test_a_large_body_comes_back_whole(extra: int, count: int) -> None:
    body = a_body(INLINE_BYTES_MAX + extra)
    inline, parts, digest = split(KEY, body)
    assert (inline, len(parts)) == (b"", count)
    assembler = Assembler()
    run = a_run(KEY, inline, len(parts), digest)
    assert assembler.take(run, 0.0) is None
    for part in parts:
        assert assembler.add(part, 0.0)
    assert assembler.take(run, 0.0) == body
    assert (assembler.nbytes, assembler.calls) == (0, 0)
    assert assembler.take(run, 0.0) is None


def test_a_body_with_a_wrong_part_is_dropped() -> None:
    _, parts, digest = split(KEY, a_body(2 * INLINE_BYTES_MAX))
    assembler = Assembler()
    assembler.add(parts[0], 0.0)
    assembler.add(BodyPart(key=KEY, index=1, data=b"not it"), 0.0)
    assert assembler.take(a_run(KEY, b"", 2, digest), 0.0) is None
    assert assembler.nbytes == 0


def test_attempts_have_parts_of_their_own() -> None:
    body = a_body(2 * INLINE_BYTES_MAX)
    second = CallKey("c1", 2)
    _, parts, digest = split(KEY, body)
    assembler = Assembler()
    for part in parts:
        assembler.add(part, 0.0)
    assert assembler.take(a_run(second, b"", 2, digest), 0.0) is None
    assert assembler.take(a_run(KEY, b"", 2, digest), 0.0) == body


def test_parts_expire_after_the_latest_of_them() -> None:
    assembler = Assembler(keep_s=10.0)
    assembler.add(BodyPart(key=KEY, index=0, data=b"a"), 0.0)
    assembler.add(BodyPart(key=CallKey("c2"), index=0, data=b"b"), 5.0)
    assembler.add(BodyPart(key=KEY, index=1, data=b"c"), 9.0)
    assembler.expire(16.0)
    assert assembler.calls == 1
    assert assembler.nbytes == 2 + 2 * PART_OVERHEAD_BYTES
    assembler.expire(19.0)
    assert assembler.calls == 0


def test_the_oldest_call_gives_way_when_bytes_run_out() -> None:
    cost = 5 + PART_OVERHEAD_BYTES
    assembler = Assembler(bytes_max=2 * cost)
    for n in range(3):
        assert assembler.add(BodyPart(key=CallKey(f"c{n}"), index=0, data=b"12345"), float(n))
    assert (assembler.calls, assembler.nbytes) == (2, 2 * cost)
    assert not assembler.add(BodyPart(key=CallKey("big"), index=0, data=b"x" * 2 * cost), 3.0)
    assert assembler.nbytes == 0
    assembler.check()


def test_tiny_parts_are_bounded_too() -> None:
    assembler = Assembler(bytes_max=10 * PART_OVERHEAD_BYTES)
    for n in range(100):
        assembler.add(BodyPart(key=CallKey(f"c{n}"), index=0, data=b""), 0.0)
    assert assembler.calls == 10
