"""What a model's config.json says about its shape. IO (reads one file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from talaria_common.errors import Unavailable

ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Context that `llama3` scaling was trained from."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a dense decoder."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope: Rope
    is_tied: bool
    """The output head is the embedding."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool

    def kv_block_items(self, block_tokens: int) -> int:
        """Numbers in one KV block [layers, 2, kv_heads, block_tokens, head_dim]."""
        return self.layers * 2 * self.kv_heads * block_tokens * self.head_dim


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json; raises Unavailable `model_failed` for a model this engine cannot run."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Unavailable("model_failed", f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise Unavailable("model_failed", f"{path} must hold a JSON object")
    try:
        return _spec(config)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise Unavailable("model_failed", f"{path}: {what}") from error


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    names = config.get("architectures") or ["none"]
    architecture = str(names[0])
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture} is not supported by the torch engine; "
            f"it runs {', '.join(ARCHITECTURES)}"
        )
    _refuse(config)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    has_bias = bool(config.get("attention_bias"))
    context = int(config["max_position_embeddings"])
    return ModelSpec(
        architecture=architecture,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        context=context,
        norm_eps=float(config["rms_norm_eps"]),
        rope=_rope(config, context),
        is_tied=bool(config.get("tie_word_embeddings")),
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias and architecture != "Qwen2ForCausalLM",
        has_qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise ValueError for what would silently change the output."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported")
    if config.get("use_sliding_window"):
        raise ValueError("sliding window attention is not supported")
    if config.get("quantization_config"):
        raise ValueError("quantised weights are not supported")


def _rope(config: Mapping[str, Any], context: int) -> Rope:
    """From `rope_parameters`, or from the older pair `rope_theta`, `rope_scaling`."""
    values = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported: default, linear or llama3")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    return Rope(
        theta=float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_context=int(values.get("original_max_position_embeddings", context)),
    )
