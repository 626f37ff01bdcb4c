"""Bodies too large for one message: cut by the sender, put together by the receiver. Pure.

    gateway:   split(key, body) ─▶ BodyPart ... BodyPart, then RunCall(parts, digest)
    instance:  Assembler.add(part) ... then Assembler.take(run)

Parts and RunCall travel on one connection but on two subjects, so that the last parts may be
handled after the RunCall: `take` then answers None, and the receiver asks again at the next part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from talaria_common.wire import BodyPart, CallKey, RunCall

INLINE_BYTES_MAX: Final = 512 * 1024
"""A larger body travels in parts; also the size of a part, so that tokens pass between two."""

PART_OVERHEAD_BYTES: Final = 128
"""What a held part costs beside its data, so that many tiny parts are bounded too."""

_DIGEST_BYTES: Final = 16


def split(key: CallKey, body: bytes) -> tuple[bytes, tuple[BodyPart, ...], bytes]:
    """`body` as RunCall's `body`, the parts to send before it, and its `digest`.

    A small body is inline, with no parts and an empty digest.
    """
    if len(body) <= INLINE_BYTES_MAX:
        return body, (), b""
    starts = range(0, len(body), INLINE_BYTES_MAX)
    parts = tuple(
        BodyPart(key=key, index=n, data=body[start : start + INLINE_BYTES_MAX])
        for n, start in enumerate(starts)
    )
    return b"", parts, digest_of(body)


def digest_of(body: bytes) -> bytes:
    """What RunCall carries to tell that the parts make the body."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


@dataclass
class _Held:
    expires_s: float
    parts: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0


class Assembler:
    """Parts that wait for their RunCall, bounded in bytes and time; the oldest call gives way."""

    def __init__(self, *, bytes_max: int = 64 * 2**20, keep_s: float = 10.0) -> None:
        """`keep_s` is how long after its latest part a call is kept."""
        self._bytes_max = bytes_max
        self._keep_s = keep_s
        self._held: dict[CallKey, _Held] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, overhead included."""
        return self._nbytes

    @property
    def calls(self) -> int:
        """Calls of which parts are held."""
        return len(self._held)

    def add(self, part: BodyPart, now_s: float) -> bool:
        """Keep a part; repeats are ignored. False if it was dropped: it alone is over the bound."""
        self.expire(now_s)
        held = self._held.pop(part.key, None) or _Held(now_s)
        self._held[part.key] = held  # now the latest
        held.expires_s = now_s + self._keep_s
        if part.index not in held.parts:
            held.parts[part.index] = part.data
            cost = len(part.data) + PART_OVERHEAD_BYTES
            held.nbytes += cost
            self._nbytes += cost
        while self._nbytes > self._bytes_max:
            self.drop(next(iter(self._held)))
        return part.key in self._held

    def take(self, run: RunCall, now_s: float) -> bytes | None:
        """The body of `run`, once; None while parts are missing.

        Parts that do not make the digest are dropped: the sender's attempt ends by its time-out.
        """
        if not run.parts:
            return run.body
        self.expire(now_s)
        held = self._held.get(run.grant.key)
        if held is None or any(n not in held.parts for n in range(run.parts)):
            return None
        body = b"".join(held.parts[n] for n in range(run.parts))
        self.drop(run.grant.key)
        return body if digest_of(body) == run.digest else None

    def drop(self, key: CallKey) -> None:
        """Forget a call's parts."""
        held = self._held.pop(key, None)
        if held is not None:
            self._nbytes -= held.nbytes

    def expire(self, now_s: float) -> None:
        """Forget calls whose latest part is too old."""
        for key, held in list(self._held.items()):
            if held.expires_s > now_s:
                break  # ordered by latest part
            self.drop(key)

    def check(self) -> None:
        """Assert what must always hold."""
        assert self._nbytes == sum(held.nbytes for held in self._held.values())
        assert 0 <= self._nbytes <= self._bytes_max
        for held in self._held.values():
            overhead = PART_OVERHEAD_BYTES * len(held.parts)
            assert held.nbytes == overhead + sum(len(data) for data in held.parts.values())
