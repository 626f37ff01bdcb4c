"""What transformers says: the reference of the equality tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

SMALL_GAP = 1e-3
"""Two best logits closer than this may change places with the order of summation."""


@functools.cache
def model(path: str) -> torch.nn.Module:
    """The model of a catalogue folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(Path(path), dtype=torch.float32).eval()


def next_logits(path: str, tokens: Sequence[int], got: Sequence[int]) -> torch.Tensor:
    """Logits [len(got), vocab] that each of `got` was chosen from, after `tokens`."""
    with torch.inference_mode():
        ids = torch.tensor([[*tokens, *got[:-1]]])
        logits: torch.Tensor = model(path)(ids).logits[0, len(tokens) - 1 :]
    return logits


def top2_gap(logits: torch.Tensor) -> float:
    """How far the best of one row of logits is ahead of the second."""
    best = logits.topk(2).values
    return float(best[0] - best[1])
