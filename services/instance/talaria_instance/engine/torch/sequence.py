"""One call's state in the engine, and which calls a step takes. Pure.

waiting ──place──▶ placed (has blocks): prefill ─▶ decode ──▶ over
   ▲                  │
   └─ pause, preempt ─┘   tokens, sampler and saved KV stay on the host
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import EngineCall
from talaria_instance.engine.torch.blocks import extend_chain
from talaria_instance.engine.torch.host import HostBlock
from talaria_instance.engine.torch.ports import Output
from talaria_instance.engine.torch.sampler import TokenSampler
from talaria_instance.engine.torch.stream import CallStream
from talaria_instance.engine.torch.text import Prompt

if TYPE_CHECKING:
    import torch


class Prepared(msgspec.Struct, frozen=True):
    """Payload of an EngineCall of this engine."""

    prompt: Prompt
    root: bytes
    """Start of its chain of block digests: tenant and model."""
    digests: tuple[bytes, ...]
    """Of the prompt's full blocks."""
    session: str


@dataclass(slots=True, eq=False)
class RunningCall:
    """A sequence from admission to its end."""

    call: EngineCall
    order: int
    """Admission order within the engine."""
    prepared: Prepared
    output: Output
    eos_ids: frozenset[int]
    sampler: TokenSampler
    stream: CallStream
    tokens: list[int]
    """Prompt and output."""
    digests: list[bytes]
    blocks: list[int] = field(default_factory=list)
    """On the device; empty while waiting."""
    computed: int = 0
    """Leading tokens whose KV is in `blocks`; 0 while waiting."""
    published: int = 0
    """Leading blocks that were offered for reuse and for saving."""
    saved: dict[int, HostBlock[torch.Tensor]] = field(default_factory=dict)
    """Pinned host copies by block index; the last one may be of a partial block."""
    cached_tokens: int | None = None
    """Prompt tokens that needed no prefill; None until first placed."""
    restored_tokens: int = 0
    """Brought back by its last placing."""
    restored_s: float = 0.0

    @property
    def key(self) -> CallKey:
        return self.call.key

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.call.prompt_tokens

    @property
    def is_placed(self) -> bool:
        return bool(self.blocks)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is missing; the last one of them yields the next token."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.is_placed and self.generated > 0 and self.remaining == 1

    @property
    def remaining_prefill(self) -> int:
        """Tokens still to be prefilled: of the prompt, or of all when KV has to be made again."""
        if self.is_decoding or (not self.is_placed and self.generated):
            return 0
        return self.remaining

    def extend_digests(self, block_tokens: int) -> None:
        """Bring `digests` up to the computed full blocks."""
        extend_chain(self.digests, self.prepared.root, self.tokens[: self.computed], block_tokens)

    def parent_of(self, block: int) -> bytes:
        """Digest before block index `block`."""
        return self.digests[block - 1] if block else self.prepared.root


def decode_batch(calls: Iterable[RunningCall]) -> list[RunningCall]:
    """Calls whose next token is due, longest context first so that like lengths are neighbours."""
    due = [c for c in calls if c.is_decoding]
    return sorted(due, key=lambda c: (-len(c.blocks), c.order))


def prefill_share(placed: Sequence[RunningCall], budget: int) -> list[tuple[RunningCall, int]]:
    """Calls and how many of their tokens the next chunk computes: in order, until it is full."""
    chunk: list[tuple[RunningCall, int]] = []
    for call in placed:
        if budget <= 0:
            break
        if call.is_placed and not call.is_decoding:
            count = min(call.remaining, budget)
            chunk.append((call, count))
            budget -= count
    return chunk
