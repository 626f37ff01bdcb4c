"""A model's weights as one contiguous image, laid out for the runtime. IO (reads safetensors).

Query, key and value projections are stacked into one matrix, gate and up projections into
another. Every parameter has a fixed offset, so that its view in the arena has the same address
after each switch.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from talaria_common.errors import Unavailable
from talaria_instance.engine.torch.spec import ModelSpec

log = logging.getLogger(__name__)

ALIGN_BYTES: Final = 256
SAMPLE_BYTES: Final = 1 << 20
PROGRESS_S: Final = 2.0


class Part(msgspec.Struct, frozen=True):
    """One runtime parameter, stacked from the file's tensors along their first dimension."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    offset: int = 0
    """Bytes from the start of the image."""


class WeightLayout(msgspec.Struct, frozen=True):
    """Where each parameter is in a model's image."""

    parts: tuple[Part, ...]
    nbytes: int

    def views(self, image: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Parameters as views into `image`, uint8 [at least nbytes]."""
        size = dtype.itemsize
        out = {}
        for part in self.parts:
            items = _items(part.shape)
            flat = image[part.offset : part.offset + items * size].view(dtype)
            out[part.name] = flat.view(part.shape)
        return out


def weight_layout(spec: ModelSpec, item_bytes: int) -> WeightLayout:
    """Offsets of all parameters; a function of the model's shape alone."""
    parts, offset = [], 0
    for part in _parts(spec):
        parts.append(msgspec.structs.replace(part, offset=offset))
        size = _items(part.shape) * item_bytes
        offset += -(-size // ALIGN_BYTES) * ALIGN_BYTES
    return WeightLayout(tuple(parts), offset)


def load_image(
    folder: Path, layout: WeightLayout, dtype: torch.dtype, *, is_pinned: bool
) -> torch.Tensor:
    """Read a model's safetensors files into host memory, uint8 [layout.nbytes].

    Raises Unavailable `model_failed` if a tensor is missing or has the wrong shape.
    """
    files = weight_files(folder)
    image = torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=is_pinned)
    views = layout.views(image, dtype)
    try:
        with ExitStack() as stack:
            tensors: dict[str, Any] = {}
            for file in files:
                handle = stack.enter_context(safe_open(file, framework="pt"))
                tensors.update(dict.fromkeys(handle.keys(), handle))
            told_s = time.monotonic()
            for part in layout.parts:
                _fill(views[part.name], part, tensors, folder)
                if time.monotonic() - told_s > PROGRESS_S:
                    told_s = time.monotonic()
                    log.info("%s: %d %% read", folder.name, part.offset * 100 // layout.nbytes)
    except (OSError, SafetensorError) as error:
        raise Unavailable("model_failed", f"{folder}: cannot read weights: {error}") from error
    return image


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files; raises Unavailable `model_failed` if it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Unavailable("model_failed", f"{folder} has no *.safetensors file")
    return files


def model_identity(folder: Path) -> bytes:
    """Digest that two copies of a model share and two models do not.

    Covers config.json and of each weight file its size, first and last MiB, so that it is quick;
    the first holds the table of tensors.
    """
    digest = hashlib.blake2b(folder.joinpath("config.json").read_bytes(), digest_size=16)
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with file.open("rb") as handle:
            digest.update(handle.read(SAMPLE_BYTES))
            handle.seek(max(0, size - SAMPLE_BYTES))
            digest.update(handle.read(SAMPLE_BYTES))
    return digest.digest()


def _fill(target: torch.Tensor, part: Part, tensors: dict[str, Any], folder: Path) -> None:
    row = 0
    for source in part.sources:
        if source not in tensors:
            raise Unavailable("model_failed", f"{folder}: tensor {source} is missing")
        tensor = tensors[source].get_tensor(source)
        rows = tensor.shape[0]
        if tensor.shape[1:] != target.shape[1:] or row + rows > target.shape[0]:
            raise Unavailable(
                "model_failed",
                f"{folder}: tensor {source} has shape {tuple(tensor.shape)}, "
                f"which does not fit {part.shape}",
            )
        target[row : row + rows].copy_(tensor)
        row += rows
    if row != target.shape[0]:
        raise Unavailable("model_failed", f"{folder}: {part.name} wants {part.shape}, got {row}")


def _parts(spec: ModelSpec) -> Iterator[Part]:
    hidden, inner = spec.hidden, spec.intermediate
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield Part("embed", (spec.vocab, hidden), ("model.embed_tokens.weight",))
    for n in range(spec.layers):
        at, own = f"model.layers.{n}.", f"{n}."
        attention = at + "self_attn."
        qkv = tuple(f"{attention}{x}_proj" for x in "qkv")
        yield Part(own + "norm_in", (hidden,), (at + "input_layernorm.weight",))
        yield Part(own + "qkv", (query + 2 * key, hidden), tuple(f"{name}.weight" for name in qkv))
        if spec.has_qkv_bias:
            yield Part(own + "qkv_bias", (query + 2 * key,), tuple(f"{x}.bias" for x in qkv))
        if spec.has_qk_norm:
            yield Part(own + "q_norm", (spec.head_dim,), (attention + "q_norm.weight",))
            yield Part(own + "k_norm", (spec.head_dim,), (attention + "k_norm.weight",))
        yield Part(own + "out", (hidden, query), (attention + "o_proj.weight",))
        if spec.has_output_bias:
            yield Part(own + "out_bias", (hidden,), (attention + "o_proj.bias",))
        yield Part(own + "norm_mid", (hidden,), (at + "post_attention_layernorm.weight",))
        yield Part(
            own + "gate_up",
            (2 * inner, hidden),
            (at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"),
        )
        yield Part(own + "down", (hidden, inner), (at + "mlp.down_proj.weight",))
    yield Part("norm", (hidden,), ("model.norm.weight",))
    if not spec.is_tied:
        yield Part("head", (spec.vocab, hidden), ("lm_head.weight",))


def _items(shape: tuple[int, ...]) -> int:
    items = 1
    for length in shape:
        items *= length
    return items
