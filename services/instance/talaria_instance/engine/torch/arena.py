"""The one device buffer: weights at the low end, block-major KV above. IO (device memory).

    page 0                    kv_start(model)
    ├── weights of the active model ──┼── KV [blocks, layers, 2, kv_heads, tokens, head_dim] ──┤

A switch writes other weights and re-lays the KV region; the buffer itself never moves.
"""

from __future__ import annotations

from typing import Final

import torch

PAGE_BYTES: Final = 2 << 20


class Arena:
    """One preallocated buffer and its views."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Zeros, not empty: pages are touched now and not at the first switch, and no stale bytes
        # can decode to NaN, which an attention mask would not hide.
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes

    def weights(self, nbytes: int) -> torch.Tensor:
        """The weight region of a model, uint8 [nbytes]."""
        return self._buffer[:nbytes]

    def kv_blocks(self, weight_bytes: int, block_bytes: int) -> int:
        """KV blocks that fit above weights of that size."""
        return max(0, (self.nbytes - kv_start(weight_bytes)) // block_bytes)

    def kv(
        self, weight_bytes: int, block_shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The KV region as blocks, [blocks, *block_shape]."""
        items = 1
        for length in block_shape:
            items *= length
        count = self.kv_blocks(weight_bytes, items * dtype.itemsize)
        start = kv_start(weight_bytes)
        region = self._buffer[start : start + count * items * dtype.itemsize]
        return region.view(dtype).view(count, *block_shape)


def kv_start(weight_bytes: int) -> int:
    """First byte of the KV region: the page after the weights."""
    return -(-weight_bytes // PAGE_BYTES) * PAGE_BYTES
