"""Rotary position embedding: inverse frequencies. Pure."""

from __future__ import annotations

import math

import torch

from talaria_instance.engine.torch.spec import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    plain = 1.0 / (rope.theta ** (pairs / head_dim))
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between mixed (Llama 3.1)."""
    waves = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    share = (rope.original_context / waves - low) / (high - low)
    mixed = (1 - share) * plain / rope.factor + share * plain
    scaled = torch.where(waves > rope.original_context / low, plain / rope.factor, mixed)
    return torch.where(waves < rope.original_context / high, plain, scaled)
