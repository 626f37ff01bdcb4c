"""First measurements of a model: a switch, two prefills, a few decode steps, a restore. IO (device)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from talaria_instance.engine.torch.loaded import LoadedModel
from talaria_instance.engine.torch.model import Span
from talaria_instance.engine.torch.residence import Residence

log = logging.getLogger(__name__)

SHORT_TOKENS: Final = 16
LONG_TOKENS: Final = 96
DECODE_STEPS: Final = 3
RESTORE_BLOCKS: Final = 4


def measure(model: LoadedModel, residence: Residence) -> None:
    """Make the model active and fill its timing; touches buffers on the way.

    Prefill is taken as fixed + tokens * slope through two lengths.
    """
    residence.activate(model)
    residence.active = None
    switch_s = residence.activate(model).seconds
    timing = model.timing
    long = min(LONG_TOKENS, model.max_model_len - DECODE_STEPS - 1)
    blocks = residence.pool.allocate(-(-model.max_model_len // model.block_tokens)) or []
    forward = residence.decoder.forward

    def prefill(tokens: int) -> float:
        return _seconds(partial(forward, [Span([1] * tokens, 0, blocks)]), residence.device)

    prefill(SHORT_TOKENS)
    short_s, long_s = prefill(SHORT_TOKENS), prefill(long)
    slope_s = max((long_s - short_s) / max(long - SHORT_TOKENS, 1), long_s / long * 0.1)
    timing.prefill_token_s = slope_s
    timing.prefill_fixed_s = max(short_s - SHORT_TOKENS * slope_s, 0.0)
    timing.decode_step_s = min(
        _seconds(partial(forward, [Span([1], at, blocks)]), residence.device)
        for at in range(long, long + DECODE_STEPS)
    )
    timing.restore_token_s = _restore_token_s(model, residence)
    timing.switch_s = switch_s
    residence.pool.release(blocks)
    log.info(
        "%s: prefill %.1f ms + %.2f ms a token, decode %.1f ms, switch %.0f ms, %d KV blocks",
        model.entry.id,
        timing.prefill_fixed_s * 1e3,
        timing.prefill_token_s * 1e3,
        timing.decode_step_s * 1e3,
        switch_s * 1e3,
        model.blocks,
    )


def _restore_token_s(model: LoadedModel, residence: Residence) -> float:
    copy = torch.zeros(model.block_bytes, dtype=torch.uint8)
    count = min(RESTORE_BLOCKS, model.blocks)

    def restore() -> None:
        for block in range(count):
            residence.kv_block(block).copy_(copy)

    return _seconds(restore, residence.device) / (count * model.block_tokens)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    started_s = time.monotonic()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - started_s
