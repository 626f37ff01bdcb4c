"""A torch engine whose calls are token ids, in and out: what the equality tests compare."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from talaria_common.config import ModelEntry
from talaria_common.wire import CallKey, ToolDelta
from talaria_instance.engine.protocol import (
    EngineCall,
    EngineRequest,
    KvBlock,
    Quantum,
    StepReport,
    SwitchRecord,
)
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.engine import TorchEngine
from talaria_instance.engine.torch.sequence import RunningCall
from talaria_instance.engine.torch.text import Piece, Prompt, Sampling

MAX_S = 60.0


class TokenText:
    """The text side of a model without text: a prompt is a list of ids, and so is an output."""

    def __init__(self, folder: Path, chat_template: str = "") -> None:
        self.eos_ids: frozenset[int] = frozenset()
        self.vocab_size = 0

    def prepare(self, request: EngineRequest, max_model_len: int) -> Prompt:
        return Prompt(
            tokens=tuple(request.body["prompt"]), sampling=Sampling(**request.body["sampling"])
        )

    def output(self, prompt: Prompt) -> TokenOutput:
        return TokenOutput()


class TokenOutput:
    """Each token as a number and a space."""

    has_tool_calls = False

    def push(self, token: int) -> Piece:
        return Piece(f"{token} ")

    def finish(self) -> Piece:
        return Piece()

    def allowed_mask(self) -> None:
        return None


class TokenSink:
    """Collects ids by call."""

    def __init__(self) -> None:
        self.texts: defaultdict[CallKey, str] = defaultdict(str)
        self.cached: dict[CallKey, int] = {}
        self.restored_tokens: dict[CallKey, int] = {}
        self.ends: dict[CallKey, tuple[str | None, str | None]] = {}
        self.saved: list[KvBlock] = []

    def restored(self, key: CallKey, seconds: float, tokens: int) -> None:
        self.restored_tokens[key] = tokens

    def first_token(self, key: CallKey, cached_tokens: int) -> None:
        self.cached[key] = cached_tokens

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        self.texts[key] += text

    def ended(self, key: CallKey, finish: str | None, failed: str | None, tokens: int) -> None:
        self.ends[key] = (finish, failed)

    def kv_saved(self, blocks: Sequence[KvBlock]) -> None:
        self.saved += blocks

    def kv_dropped(self, prefixes: Sequence[bytes]) -> None:
        pass


class Rig:
    """A started engine, driven from synchronous tests."""

    def __init__(self, entries: Sequence[ModelEntry], **config: Any) -> None:
        self.sink = TokenSink()
        self.engine = TorchEngine(entries, TorchConfig(**config), self.sink, TokenText)
        self._count = itertools.count()
        asyncio.run(self.engine.start())

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run(self.engine.close())

    def call(
        self, model: str, tokens: Sequence[int], max_tokens: int, tenant: str = "", **sampling: Any
    ) -> EngineCall:
        """A prepared call, greedy unless told otherwise."""
        settings = {"temperature": 0.0, "max_tokens": max_tokens} | sampling
        request = EngineRequest(
            key=CallKey(f"c{next(self._count)}"),
            model=model,
            endpoint="completions",
            body={"prompt": list(tokens), "sampling": settings},
            tenant=tenant,
        )
        return asyncio.run(self.engine.prepare(request))

    def activate(self, model: str) -> SwitchRecord:
        return asyncio.run(self.engine.activate(model))

    def run(self, model: str, iterations: int = 10_000, prefill: int = 1_000_000) -> StepReport:
        quantum = Quantum(
            model=model, max_decode_iterations=iterations, max_prefill_tokens=prefill, max_s=MAX_S
        )
        return asyncio.run(self.engine.run(quantum))

    def finish(self, *calls: EngineCall) -> list[list[int]]:
        """Run until the calls, of the active model, are over; their ids."""
        while any(c.key not in self.sink.ends for c in calls):
            assert self.run(calls[0].model).stop != "idle"
        return [self.output(c) for c in calls]

    def generate(self, *calls: EngineCall) -> list[list[int]]:
        """Output of calls that run together; makes their model active."""
        self.activate(calls[0].model)
        self.engine.admit(calls)
        return self.finish(*calls)

    def output(self, call: EngineCall) -> list[int]:
        return [int(word) for word in self.sink.texts[call.key].split()]

    def live(self, call: EngineCall) -> RunningCall:
        """The engine's own state of an unfinished call."""
        calls = self.engine.core.models[call.model].calls
        return next(c for c in calls if c.key == call.key)

    def weights_digest(self, model: str) -> str:
        """Of the bytes in the arena that hold the active model's weights."""
        core = self.engine.core
        return _digest([core.residence.arena.weights(core.models[model].layout.nbytes)])

    def kv_digest(self, blocks: Sequence[int]) -> str:
        return _digest([self.engine.core.residence.kv_block(block) for block in blocks])

    def prefix_blocks(self, call: EngineCall) -> list[int]:
        """Device blocks that hold the full blocks of a prompt, as far as they are cached."""
        pool = self.engine.core.residence.pool
        blocks = pool.share(call.payload.digests)
        pool.release(blocks)
        return blocks


def _digest(parts: Sequence[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.cpu().numpy().tobytes())
    return whole.hexdigest()
