"""Settings of the torch engine. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class TorchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one torch engine uses its device and its host."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, bfloat16 on CUDA."""
    arena_bytes: Annotated[int, Meta(ge=0)] = 0
    """Weights and KV together; 0: the largest model and 1.2 GB of KV on the CPU, on CUDA
    `memory_fraction` of what is free at start."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8
    host_kv_bytes: Annotated[int, Meta(ge=0)] = 2_000_000_000
    """Most host memory for KV copies of finished and paused calls."""
    keep_finished_kv: bool = True
    """False: host copies last only as long as their call (policy `no-hkvr`)."""
    block_tokens: Annotated[int, Meta(ge=1, le=256)] = 16
    prefill_chunk_tokens: Positive = 512
    """Most prompt tokens computed between two decode iterations."""
    prefill_slice_tokens: Annotated[int, Meta(ge=0)] = 0
    """Most prompt tokens in one forward pass, after which aborts and bounds are looked at;
    0: 128 on the CPU (half a second of a 135 M model on two cores), a whole chunk on CUDA."""
    max_batch: Positive = 32
    """Most sequences on the device at a time."""
    threads: Positive = 2
    """CPU threads of one operation."""
