"""What the torch engine reads from config.json, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from talaria_common.errors import Unavailable
from talaria_instance.engine.torch.spec import ModelSpec, load_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def load(folder: Path, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return load_spec(folder)


def test_head_dim_and_kv_heads_have_their_usual_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, num_key_value_heads=None)
    assert (spec.head_dim, spec.kv_heads) == (16, 4)


def test_a_block_holds_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    assert load(tmp_path).kv_block_items(16) == 2 * 2 * 2 * 16 * 16


def test_qwen2_has_biases_and_qwen3_norms(tmp_path: Path) -> None:
    qwen2 = load(tmp_path, architectures=["Qwen2ForCausalLM"])
    qwen3 = load(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen2.has_qkv_bias, qwen2.has_output_bias, qwen2.has_qk_norm) == (True, False, False)
    assert (qwen3.has_qkv_bias, qwen3.has_output_bias, qwen3.has_qk_norm) == (False, False, True)


ROPES: dict[str, dict[str, Any]] = {
    "new": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    "old": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("form", ROPES)
def test_both_forms_of_rope_are_read(tmp_path: Path, form: str) -> None:
    rope = load(tmp_path, **ROPES[form]).rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "sliding window": ({"use_sliding_window": True}, "sliding"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
    "no size": ({"hidden_size": None}, "config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_wrong_output_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, named = REFUSED[case]
    with pytest.raises(Unavailable, match=named) as caught:
        load(tmp_path, **changes)
    assert caught.value.code == "model_failed"


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"config\.json"):
        load_spec(tmp_path)
