"""A model that is loaded on the host, and what is known of its cost. IO (reads files)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from talaria_common.config import ModelEntry
from talaria_common.errors import Unavailable
from talaria_instance.engine.protocol import ModelFacts
from talaria_instance.engine.torch.arena import Arena
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.ports import TextLoader, TextModel
from talaria_instance.engine.torch.sequence import RunningCall
from talaria_instance.engine.torch.spec import ModelSpec, load_spec
from talaria_instance.engine.torch.weights import (
    WeightLayout,
    load_image,
    model_identity,
    weight_layout,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Timing:
    """Measured seconds of one model."""

    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    restore_token_s: float = 0.0
    switch_s: float = 0.0


@dataclass(slots=True, eq=False)
class LoadedModel:
    """Weights, shape and text side of one catalogue entry."""

    entry: ModelEntry
    spec: ModelSpec
    layout: WeightLayout
    image: torch.Tensor
    """Weights on the host, uint8; never changed."""
    dtype: torch.dtype
    identity: bytes
    text: TextModel
    block_tokens: int
    blocks: int = 0
    """KV blocks above its weights in the arena."""
    max_model_len: int = 0
    timing: Timing = field(default_factory=Timing)
    calls: list[RunningCall] = field(default_factory=list)
    """Unfinished, in admission order; touched by the engine thread alone."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        s = self.spec
        return (s.layers, 2, s.kv_heads, self.block_tokens, s.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.spec.kv_block_items(self.block_tokens) * self.dtype.itemsize

    def fit(self, arena: Arena) -> None:
        """Settle blocks and context; raises Unavailable `model_failed` if the arena is too small."""
        self.blocks = arena.kv_blocks(self.layout.nbytes, self.block_bytes)
        if self.layout.nbytes > arena.nbytes or self.blocks < 2:
            need = self.layout.nbytes + 64 * self.block_bytes
            raise Unavailable(
                "model_failed",
                f"{self.entry.id}: weights ({self.layout.nbytes:,} bytes) and KV do not fit "
                f"the arena of {arena.nbytes:,} bytes; set arena_bytes to {need:,} or more",
            )
        wanted = self.entry.max_model_len or self.spec.context
        if wanted > self.spec.context:
            log.warning("%s: context cut to the model's %d", self.entry.id, self.spec.context)
        self.max_model_len = min(wanted, self.spec.context, self.blocks * self.block_tokens)

    def facts(self, *, is_active: bool) -> ModelFacts:
        """For the snapshot."""
        timing = self.timing
        return ModelFacts(
            model=self.entry.id,
            residency="active" if is_active else "host",
            max_model_len=self.max_model_len,
            block_tokens=self.block_tokens,
            blocks_max=self.blocks,
            kv_bytes_per_token=self.block_bytes // self.block_tokens,
            weight_bytes=self.layout.nbytes,
            prefill_fixed_s=timing.prefill_fixed_s,
            prefill_token_s=timing.prefill_token_s,
            decode_step_s=timing.decode_step_s,
            restore_token_s=timing.restore_token_s,
            switch_s=0.0 if is_active else timing.switch_s,
        )


def load_model(
    entry: ModelEntry, config: TorchConfig, device: torch.device, load_text: TextLoader
) -> LoadedModel:
    """Read one entry's folder; raises Unavailable `model_failed` with what is wrong with it."""
    folder = Path(entry.path)
    if not entry.path or not folder.is_dir():
        raise Unavailable("model_failed", f"{entry.id}: no such folder: {entry.path!r}")
    started_s = time.monotonic()
    dtype = choose_dtype(config, device)
    spec = load_spec(folder)
    layout = weight_layout(spec, dtype.itemsize)
    log.info("%s: loading %.0f MB from %s", entry.id, layout.nbytes / 1e6, folder)
    model = LoadedModel(
        entry=entry,
        spec=spec,
        layout=layout,
        image=load_image(folder, layout, dtype, is_pinned=device.type == "cuda"),
        dtype=dtype,
        identity=model_identity(folder) + str(dtype).encode(),
        text=load_text(folder, entry.chat_template),
        block_tokens=config.block_tokens,
    )
    log.info("%s: loaded in %.1f s", entry.id, time.monotonic() - started_s)
    return model


def choose_device(config: TorchConfig) -> torch.device:
    """The configured device; raises Unavailable `model_failed` if CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise Unavailable("model_failed", "device is cuda, but torch finds no CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def choose_dtype(config: TorchConfig, device: torch.device) -> torch.dtype:
    """float32 on the CPU (bfloat16 is emulated without AVX-512), bfloat16 on CUDA."""
    match config.dtype:
        case "float32":
            return torch.float32
        case "bfloat16":
            return torch.bfloat16
        case "float16":
            return torch.float16
        case "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
