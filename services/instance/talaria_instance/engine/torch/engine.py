"""TorchEngine: the Engine protocol on PyTorch. IO (threads, device).

event loop ── prepare ──▶ text threads
           ── run, activate ──▶ engine thread ── saves ──▶ transfer thread
the sink is called from the engine thread and the transfer thread
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from talaria_common.config import ModelEntry
from talaria_common.errors import Rejected, Unavailable
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import (
    Capability,
    EngineCall,
    EngineFacts,
    EngineRequest,
    Locality,
    Quantum,
    Sink,
    StepReport,
    SwitchRecord,
)
from talaria_instance.engine.torch.blocks import extend_chain, root_digest
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.core import EngineCore
from talaria_instance.engine.torch.loaded import LoadedModel, choose_device, load_model
from talaria_instance.engine.torch.ports import TextLoader
from talaria_instance.engine.torch.residence import Residence
from talaria_instance.engine.torch.sequence import Prepared
from talaria_instance.engine.torch.text import ModelText, Prompt
from talaria_instance.engine.torch.warmup import measure

log = logging.getLogger(__name__)

T = TypeVar("T")

TEXT_THREADS: Final = 2
CPU_KV_BYTES: Final = 1_200_000_000
"""Default KV room on the CPU: 27,000 tokens of SmolLM2-135M in float32."""


class TorchEngine:
    """Implements engine/protocol.py for dense decoders from Hugging Face folders."""

    capabilities: frozenset[Capability] = frozenset(
        ("exact_quanta", "host_kv", "structured_output", "several_models", "real_text")
    )

    def __init__(
        self,
        models: Sequence[ModelEntry],
        config: TorchConfig,
        sink: Sink,
        load_text: TextLoader = ModelText,
    ) -> None:
        self._entries = tuple(models)
        self._config = config
        self._sink = sink
        self._load_text = load_text
        self._core: EngineCore | None = None
        self._is_closed = False
        self._work = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._texts = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="torch-text")

    @property
    def core(self) -> EngineCore:
        """The started engine's inside; raises Unavailable before `start` and after `close`."""
        if self._core is None or self._is_closed:
            raise Unavailable("model_failed", "the torch engine is not running")
        return self._core

    async def start(self) -> None:
        """Load all models, lay out the arena, measure each model once."""
        self._core = await self._in_engine_thread(self._start)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._core is not None:
            # Before the thread is waited for: it makes a run in progress return.
            self._core.is_closed = True
            await self._in_engine_thread(self._core.close)
        await asyncio.to_thread(self._work.shutdown)
        self._texts.shutdown(cancel_futures=True)
        self._core = None
        gc.collect()

    def facts(self) -> EngineFacts:
        residence, models = self.core.residence, self.core.models
        active = residence.active
        return EngineFacts(
            engine="torch",
            device=str(residence.device),
            active=active.entry.id if active else None,
            models=tuple(m.facts(is_active=m is active) for m in models.values()),
            blocks_free=residence.pool.unowned,
            blocks_total=residence.pool.total,
            host_kv_bytes=residence.host.nbytes,
        )

    async def prepare(self, request: EngineRequest) -> EngineCall:
        model = self._model(request.model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, self._prepare, model, request)

    def locality(self, call: EngineCall) -> Locality:
        return self.core.residence.locality(self._model(call.model), call.payload)

    async def activate(self, model: str) -> SwitchRecord:
        self._model(model)
        core = self.core
        return await self._in_engine_thread(lambda: core.activate(model))

    def admit(self, calls: Sequence[EngineCall]) -> None:
        self.core.admit(calls)

    def abort(self, key: CallKey) -> bool:
        return self._core is not None and self._core.abort(key)

    async def run(self, quantum: Quantum) -> StepReport:
        core = self.core
        core.clear_wake()
        return await self._in_engine_thread(lambda: core.run(quantum))

    def wake(self) -> None:
        if self._core is not None:
            self._core.wake()

    def drop_host_kv(self, prefixes: Sequence[bytes]) -> None:
        dropped = self.core.residence.host.drop(prefixes)
        if dropped:
            self._sink.kv_dropped(dropped)

    # --- inside ---

    def _model(self, name: str) -> LoadedModel:
        model = self.core.models.get(name)
        if model is None:
            raise Rejected("unknown_model", f"no model {name!r} here", param="model")
        return model

    async def _in_engine_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._work, act)

    def _prepare(self, model: LoadedModel, request: EngineRequest) -> EngineCall:
        prompt = model.text.prepare(request, model.max_model_len)
        return prepared_call(model, request, prompt)

    def _start(self) -> EngineCore:
        config = self._config
        torch.set_num_threads(config.threads)
        device = choose_device(config)
        models = {e.id: load_model(e, config, device, self._load_text) for e in self._entries}
        if not models:
            raise Unavailable("model_failed", "the catalogue has no model for the torch engine")
        arena_bytes = _arena_bytes(config, device, list(models.values()))
        log.info("arena of %.0f MB on %s", arena_bytes / 1e6, device)
        residence = Residence(config, device, arena_bytes, self._sink)
        try:
            for model in models.values():
                model.fit(residence.arena)
            with torch.inference_mode():
                # The first of the catalogue comes last and stays active.
                for model in reversed(models.values()):
                    measure(model, residence)
        except BaseException:
            residence.close()
            raise
        return EngineCore(config, models, residence, self._sink)


def prepared_call(model: LoadedModel, request: EngineRequest, prompt: Prompt) -> EngineCall:
    """A call from its tokens: limits, blocks and block digests."""
    size, count = model.block_tokens, len(prompt.tokens)
    max_tokens = min(prompt.sampling.max_tokens, model.max_model_len - count)
    root = root_digest(request.tenant, model.identity)
    digests: list[bytes] = []
    extend_chain(digests, root, prompt.tokens, size)
    return EngineCall(
        key=request.key,
        model=model.entry.id,
        prompt_tokens=count,
        max_tokens=max_tokens,
        blocks_needed=-(-(count + max_tokens) // size),
        payload=Prepared(prompt, root, tuple(digests), request.session),
    )


def _arena_bytes(config: TorchConfig, device: torch.device, models: Sequence[LoadedModel]) -> int:
    if config.arena_bytes:
        return config.arena_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * config.memory_fraction)
    return max(m.layout.nbytes for m in models) + CPU_KV_BYTES
