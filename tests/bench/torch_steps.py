"""Prefill and decode speed of the torch engine's forward pass, by model and batch.

Hypothesis: on two CPU cores in float32, SmolLM2-135M prefills about 220 tokens a second and takes
about 80 ms for a decode step alone, far less than eight times that for eight; the seeded models
take 12 to 18 ms.
Conditions: nothing else runs; best of several repetitions; contexts as printed.

    python -m tests.bench.torch_steps [--model ID ...] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from talaria_instance import catalog
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.loaded import choose_device, load_model
from talaria_instance.engine.torch.model import Span
from talaria_instance.engine.torch.residence import Residence
from talaria_instance.engine.torch.text import ModelText

ARENA_BYTES = 1_800_000_000
BATCHES = (1, 2, 4, 8)
CONTEXTS = (128, 1536)
PREFILLS = (16, 128, 512)
REPEATS = 5


class NoSink:
    """Nothing is saved here, so nothing is told."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def best_s(act: Callable[[], object], repeats: int = REPEATS) -> float:
    act()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - started_s)
    return min(times)


def measure(name: str, config: TorchConfig) -> dict[str, Any]:
    entries = {e.id: e for e in catalog.prepare_default(catalog.default_cache(), print)}
    device = choose_device(config)
    model = load_model(entries[name], config, device, ModelText)
    residence = Residence(config, device, ARENA_BYTES, NoSink())
    model.fit(residence.arena)
    residence.activate(model)
    forward, size = residence.decoder.forward, config.block_tokens

    def switch() -> None:
        residence.active = None
        residence.activate(model)

    row: dict[str, Any] = {"model": name, "switch_ms": best_s(switch) * 1e3}
    for tokens in PREFILLS:
        span = Span([7] * tokens, 0, range(tokens // size))
        row[f"prefill_{tokens}_tok_s"] = tokens / best_s(lambda span=span: forward([span]), 3)
    for context in CONTEXTS:
        blocks = context // size + 1
        for batch in BATCHES:
            spans = [Span([7], context, range(n * blocks, (n + 1) * blocks)) for n in range(batch)]
            step_s = best_s(lambda spans=spans: forward(spans))
            row[f"decode_{batch}x{context}_ms"] = step_s * 1e3
    residence.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=catalog.MODEL_IDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        models = args.model or catalog.MODEL_IDS
        rows = [measure(name, TorchConfig(threads=args.threads)) for name in models]
    for key in rows[0]:
        cells = (f"{r[key]:>14.1f}" if key != "model" else f"{r[key]:>14}" for r in rows)
        print(f"{key:24}", *cells)
    document = {"host_cpus": os.cpu_count(), "threads": args.threads, "rows": rows}
    print(json.dumps(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
