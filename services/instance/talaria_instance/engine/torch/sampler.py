"""Choice of the next token of one sequence. Pure of the device: works on rows in host memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from talaria_instance.engine.torch.text import Sampling

Row = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]

SEED_BITS: Final = 64
NUCLEUS_GUESS: Final = 256
"""Tokens sorted first when looking for the top_p nucleus; all are, if these do not hold it."""


class TokenSampler:
    """Sampling state of one sequence: the same whatever runs beside it, and across pauses."""

    def __init__(self, sampling: Sampling, eos_ids: Iterable[int]) -> None:
        self._sampling = sampling
        self._eos = np.fromiter(eos_ids, dtype=np.int64)
        seed = sampling.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(SEED_BITS // 8), "big")
        self._random = np.random.Generator(np.random.PCG64(seed % (1 << SEED_BITS)))

    def is_plain(self, generated: int) -> bool:
        """The next token is the most likely one of all, if no mask says otherwise."""
        return self._sampling.temperature == 0 and generated >= self._sampling.min_tokens

    def pick(self, row: Row, allowed: Bits | None, generated: int) -> int:
        """The next token; `row` [vocab] is not changed. `generated`: tokens so far."""
        is_open = np.ones(row.shape, dtype=np.bool_)
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: row.size]
            is_open[:] = False
            is_open[: bits.size] = bits.astype(np.bool_)
        if generated < self._sampling.min_tokens and self._eos.size:
            without_end = is_open.copy()
            without_end[self._eos] = False
            # A grammar that allows nothing but the end wins over min_tokens.
            is_open = without_end if without_end.any() else is_open
        masked = np.where(is_open, row, -np.inf)
        if self._sampling.temperature == 0:
            return int(masked.argmax())
        return self._draw(masked)

    def _draw(self, row: Row) -> int:
        scaled = row.astype(np.float64) / max(self._sampling.temperature, 1e-6)
        weights = np.exp(scaled - scaled.max())
        point = self._random.random()
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if not top_k and top_p >= 1.0:
            return _at(np.cumsum(weights), point)
        order = _descending(weights, top_k or min(NUCLEUS_GUESS, weights.size))
        limit = top_p * (weights[order].sum() if top_k else weights.sum())
        if not top_k and weights[order].sum() < limit:
            order = _descending(weights, weights.size)
        sums = np.cumsum(weights[order])
        if top_p < 1.0:
            # The nucleus: the fewest tokens that reach top_p, never none.
            sums = sums[: int(np.searchsorted(sums, limit)) + 1]
        return int(order[_at(sums, point)])


def _descending(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` largest, largest first; ties by index."""
    count = min(count, weights.size)
    if count < weights.size:
        chosen = np.sort(np.argpartition(-weights, count - 1)[:count])
    else:
        chosen = np.arange(weights.size)
    return chosen[np.argsort(-weights[chosen], kind="stable")]


def _at(sums: npt.NDArray[np.float64], point: float) -> int:
    """Index whose share of the cumulative `sums` holds `point` of [0, 1)."""
    return min(int(np.searchsorted(sums, point * sums[-1], side="right")), sums.size - 1)
