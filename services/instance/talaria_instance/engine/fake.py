"""An engine without a model: scripted text, modelled time, the KV book-keeping of a real one. IO.

Time passes through the given `sleep` alone, so that a virtual clock can drive it. Output depends on
the prompt (fake_text); what is reusable, restorable or lost depends on the switches, the block pool
and the host pool, as on a real device (fake_kv).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from talaria_common.clock import Clock, WallClock
from talaria_common.config import ModelEntry
from talaria_common.errors import InvariantBroken, Rejected, Unavailable
from talaria_common.wire import CallKey, Residency
from talaria_instance.engine.fake_kv import (
    DeviceCache,
    HostPool,
    extend_hashes,
    held_blocks,
    root_hash,
)
from talaria_instance.engine.fake_run import FakeRun
from talaria_instance.engine.fake_sequence import FakePayload, FakeSequence
from talaria_instance.engine.fake_text import TOKEN_BYTES, parameters, prompt_tokens, script_of
from talaria_instance.engine.protocol import (
    Capability,
    EngineCall,
    EngineFacts,
    EngineRequest,
    FinishReason,
    KvBlock,
    Locality,
    ModelFacts,
    Quantum,
    Sink,
    StepReport,
    SwitchRecord,
)

Sleep = Callable[[float], Awaitable[object]]
Positive = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]

WEIGHT_BYTES: Final = 500_000_000
"""Weights of a model whose entry states none."""


class FakeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fake engine's model of time and memory."""

    prefill_fixed_s: Positive = 0.005
    prefill_token_s: Positive = 0.0002
    decode_step_s: Positive = 0.010
    """One iteration with one sequence; a call never gets more than one token in this time."""
    decode_sequence_share: Positive = 0.01
    """How much longer an iteration is, relative to one sequence, with each further one."""
    restore_token_s: Positive = 0.00001
    switch_fixed_s: Positive = 0.001
    link_bytes_s: Annotated[float, Meta(gt=0)] = 10e9
    """Between host and device, for weights and for the KV of paused sequences."""
    block_tokens: AtLeastOne = 16
    blocks_total: AtLeastOne = 16_384
    kv_bytes_per_token: AtLeastOne = 1024
    host_kv_bytes: Annotated[int, Meta(ge=0)] = 512_000_000
    max_model_len: AtLeastOne = 8192
    prefill_chunk_tokens: AtLeastOne = 512
    """Most prompt tokens between two boundaries."""
    keep_finished_kv: bool = True
    """KV of finished calls goes to the host; paused sequences' KV always does."""
    fail_on_text: str = ""
    """Marker; a call with it in its prompt fails after a few tokens. Empty: none."""


class FakeEngine:
    """Implements engine/protocol.py for tests, the simulator and load benches."""

    def __init__(
        self,
        models: Sequence[ModelEntry],
        config: FakeConfig,
        sink: Sink,
        clock: Clock | None = None,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.config = config
        self.sink = sink
        self.clock = clock or WallClock()
        self.sleep = sleep
        self.capabilities: frozenset[Capability] = frozenset(
            ("exact_quanta", "host_kv", "structured_output", "several_models")
        )
        self.device = DeviceCache()
        self.host = HostPool(config.host_kv_bytes)
        self.waiting: dict[str, list[FakeSequence]] = {model.id: [] for model in models}
        """Admitted, without blocks yet; in order."""
        self.running: dict[str, list[FakeSequence]] = {model.id: [] for model in models}
        """With blocks: prefilling, decoding or paused."""
        self._models = {model.id: model for model in models}
        self._sequences: dict[CallKey, FakeSequence] = {}
        self._active: str | None = None
        self._run: FakeRun | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Nothing needs loading."""

    async def close(self) -> None:
        """End all calls as failed; idempotent."""
        self._is_closed = True
        for sequence in list(self._sequences.values()):
            self.end(sequence, failed="the engine was closed")
        self.device.clear()

    # --- what is known ---

    def facts(self) -> EngineFacts:
        return EngineFacts(
            engine="fake",
            device="none",
            active=self._active,
            models=tuple(self._model_facts(model) for model in self._models.values()),
            blocks_free=self.blocks_free,
            blocks_total=self.config.blocks_total,
            host_kv_bytes=self.host.nbytes,
        )

    def _model_facts(self, model: ModelEntry) -> ModelFacts:
        config = self.config
        is_active = model.id == self._active
        residency: Residency = "active" if is_active else "host"
        return ModelFacts(
            model=model.id,
            residency=residency,
            max_model_len=self._max_model_len(model),
            block_tokens=config.block_tokens,
            blocks_max=config.blocks_total,
            kv_bytes_per_token=config.kv_bytes_per_token,
            weight_bytes=model.weight_bytes or WEIGHT_BYTES,
            prefill_fixed_s=config.prefill_fixed_s,
            prefill_token_s=config.prefill_token_s,
            decode_step_s=config.decode_step_s,
            restore_token_s=config.restore_token_s,
            switch_s=0.0 if is_active else config.switch_fixed_s + self._weights_s(model),
        )

    def _max_model_len(self, model: ModelEntry) -> int:
        most = self.config.blocks_total * self.config.block_tokens
        return min(model.max_model_len or self.config.max_model_len, most)

    def _weights_s(self, model: ModelEntry) -> float:
        return (model.weight_bytes or WEIGHT_BYTES) / self.config.link_bytes_s

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence of the active model has reserved; cached ones among them."""
        taken = sum(s.call.blocks_needed for s in self.running.get(self._active or "", ()))
        return self.config.blocks_total - taken

    # --- calls ---

    async def prepare(self, request: EngineRequest) -> EngineCall:
        if self._is_closed:
            raise Unavailable("model_failed", "the engine is closed")
        model = self._models.get(request.model)
        if model is None:
            raise Rejected("unknown_model", f"no model {request.model!r} here", param="model")
        limits = parameters(request)
        tokens = prompt_tokens(request)
        count, context = len(tokens) // TOKEN_BYTES, self._max_model_len(model)
        if count >= context:
            raise Rejected(
                "context_length_exceeded",
                f"This model's maximum context length is {context} tokens, "
                f"but your prompt has {count} tokens",
                param="messages" if request.endpoint == "chat" else "prompt",
            )
        rest = context - count
        max_tokens = min(limits.max_tokens or rest, rest)
        hashes: list[bytes] = []
        root = root_hash(model.id, request.tenant)
        block_tokens = self.config.block_tokens
        extend_hashes(root, hashes, tokens, count // block_tokens, block_tokens)
        marker = self.config.fail_on_text.encode()
        payload = FakePayload(
            tokens=tokens,
            root=root,
            hashes=tuple(hashes),
            limits=limits,
            script=script_of(request, tokens, limits),
            session=request.session,
            tool_call_id=f"call_{hashlib.blake2b(str(request.key).encode()).hexdigest()[:24]}",
            is_faulty=bool(marker) and marker in tokens,
        )
        return EngineCall(
            key=request.key,
            model=model.id,
            prompt_tokens=count,
            max_tokens=max_tokens,
            blocks_needed=math.ceil((count + max_tokens) / block_tokens),
            payload=payload,
        )

    def locality(self, call: EngineCall) -> Locality:
        payload: FakePayload = call.payload
        block_tokens = self.config.block_tokens
        # The last prompt token is always computed: its output is the first token's.
        hashes = payload.hashes[: (call.prompt_tokens - 1) // block_tokens]
        on_device = held_blocks(hashes, self.device) if call.model == self._active else 0
        on_host = held_blocks(hashes[on_device:], self.host)
        return Locality(device_tokens=on_device * block_tokens, host_tokens=on_host * block_tokens)

    def admit(self, calls: Sequence[EngineCall]) -> None:
        for call in calls:
            if call.key in self._sequences:
                raise InvariantBroken(f"call {call.key} is admitted twice")
            sequence = FakeSequence(call, call.payload)
            self._sequences[call.key] = sequence
            self.waiting[call.model].append(sequence)
            if self._is_closed:
                self.end(sequence, failed="the engine was closed")

    def abort(self, key: CallKey) -> bool:
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if self._run is not None and sequence.call.model == self._active:
            sequence.is_aborting = True
        else:
            self.end(sequence)
        return True

    def end(
        self,
        sequence: FakeSequence,
        *,
        finish: FinishReason | None = None,
        failed: str | None = None,
    ) -> None:
        """Say the last word on a call and give its blocks back; neither reason: it was aborted."""
        sequence.is_over = True
        del self._sequences[sequence.call.key]
        model = sequence.call.model
        if not sequence.is_started:
            self.waiting[model].remove(sequence)
        else:
            self.running[model].remove(sequence)
            if finish is not None and self.config.keep_finished_kv:
                self._save(sequence)
            if model == self._active and not sequence.is_offloaded:
                self.device.release(sequence.hashes)
                self.device.trim(self.blocks_free)
        self.sink.ended(sequence.call.key, finish, failed, sequence.generated)

    def _save(self, sequence: FakeSequence) -> None:
        block_tokens = self.config.block_tokens
        parents = (sequence.payload.root, *sequence.hashes)
        chain = [
            KvBlock(
                prefix=prefix,
                parent=parents[n] if n else b"",
                model=sequence.call.model,
                tokens=(n + 1) * block_tokens,
                nbytes=block_tokens * self.config.kv_bytes_per_token,
                session=sequence.payload.session,
            )
            for n, prefix in enumerate(sequence.hashes)
        ]
        added, evicted = self.host.save(chain)
        if evicted:
            self.sink.kv_dropped(evicted)
        if added:
            self.sink.kv_saved(added)

    def drop_host_kv(self, prefixes: Sequence[bytes]) -> None:
        in_use = self._run.restoring if self._run is not None else frozenset[bytes]()
        dropped = self.host.drop([prefix for prefix in prefixes if prefix not in in_use])
        if dropped:
            self.sink.kv_dropped(dropped)

    # --- engine time ---

    async def activate(self, model: str) -> SwitchRecord:
        if model not in self._models:
            raise Rejected("unknown_model", f"no model {model!r} here", param="model")
        if model == self._active:
            return SwitchRecord(model=model, seconds=0.0, path="none")
        started_s = self.clock.now_s()
        saved_bytes = self._offload()
        save_s = saved_bytes / self.config.link_bytes_s
        await self.sleep(save_s)
        saved_s = self.clock.now_s()
        await self.sleep(self._weights_s(self._models[model]))
        opened_s = self.clock.now_s()
        await self.sleep(self.config.switch_fixed_s)
        if not self._is_closed:
            self._active = model
        now_s = self.clock.now_s()
        return SwitchRecord(
            model=model,
            seconds=now_s - started_s,
            save_s=saved_s - started_s,
            weights_s=opened_s - saved_s,
            publish_s=now_s - opened_s,
            moved_bytes=saved_bytes + (self._models[model].weight_bytes or WEIGHT_BYTES),
        )

    def _offload(self) -> int:
        """Take the device from the active model; returns the bytes saved for its sequences."""
        paused = [s for s in self.running.get(self._active or "", ()) if not s.is_offloaded]
        for sequence in paused:
            sequence.is_offloaded = True
        self.device.clear()
        self._active = None
        return sum(s.computed for s in paused) * self.config.kv_bytes_per_token

    async def run(self, quantum: Quantum) -> StepReport:
        if self._run is not None:
            raise InvariantBroken("a second run was started before the first ended")
        if quantum.model != self._active:
            raise InvariantBroken(f"{quantum.model} runs while {self._active} is active")
        self._run = FakeRun(self, quantum)
        try:
            return await self._run.go()
        finally:
            self._run = None

    def wake(self) -> None:
        if self._run is not None:
            self._run.is_woken = True
