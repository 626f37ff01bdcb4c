"""ULIDs for calls: 48 bits of time and 80 of randomness, in Crockford's base 32. IO (time, entropy)."""

from __future__ import annotations

import os
import re
import time
from typing import Final

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


def new_ulid() -> str:
    """A fresh id; later ones sort behind earlier ones, up to the millisecond."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def is_ulid(text: str) -> bool:
    """`text` is a ULID in its canonical spelling."""
    return _ULID.fullmatch(text) is not None
