"""Message chains: the identity of a prompt upstream of any tokeniser (protocols 5). Pure.

    h0 = H(tenant, model, canonical tools, template options)
    hk = H(h(k-1), canonical message k)

Two histories share a prefix of links exactly if they would render the same prompt prefix, as far
as that can be known without rendering.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from talaria_common.wire import Link

LINKS_MAX: Final = 64
"""Links that travel with a PlaceCall; a tool-using agent adds two a call."""

_DIGEST_BYTES: Final = 16
_canonical: Final = msgspec.json.Encoder(order="deterministic")

# A harness line that changes with every call counts neither for identity nor in the prompt.
VOLATILE_LINE: Final = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.M)


def without_volatile_lines(text: str) -> str:
    """`text` without lines that harnesses change on every call (they would defeat prefix reuse)."""
    return VOLATILE_LINE.sub("", text) if "x-anthropic-billing-header:" in text else text


def canonical_message(message: Mapping[str, Any]) -> bytes:
    """One message as bytes: absent, null and empty fields alike, text parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            part.get("text", "") if isinstance(part, dict) else str(part) for part in content
        )
    kept = {
        "role": message.get("role"),
        "content": content or "",
        "tool_calls": [
            {"name": call["function"]["name"], "arguments": call["function"].get("arguments", "")}
            for call in message.get("tool_calls") or ()
        ],
        "name": message.get("name") or "",
    }
    return _canonical.encode(kept)


def root(tenant: str, model: str, tools: Any, options: Any = None) -> bytes:
    """h0: what all prompts of these tools and this model have in common, for one tenant."""
    return _digest(b"", _canonical.encode([tenant, model, tools or [], options or {}]))


def extend(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """The digest after one more message."""
    return _digest(digest, canonical_message(message))


def links(start: bytes, messages: Iterable[Mapping[str, Any]]) -> list[Link]:
    """All links of a prompt, oldest first; the root itself is not one."""
    out: list[Link] = []
    digest, end_bytes = start, 0
    for message in messages:
        canonical = canonical_message(message)
        digest = _digest(digest, canonical)
        end_bytes += len(canonical)
        out.append(Link(digest, end_bytes, message.get("role") == "assistant"))
    return out


def _digest(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=_DIGEST_BYTES).digest()
