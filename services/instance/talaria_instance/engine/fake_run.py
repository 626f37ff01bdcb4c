"""One run of the fake engine: prefills and decode iterations between boundaries. IO (sleeps).

    boundary ──▶ prefill chunk ──▶ boundary ──▶ decode iteration ──▶ boundary ──▶ ...

Everything that came meanwhile (aborts, a wake, admissions) takes effect at the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from talaria_common.wire import CallKey
from talaria_instance.engine.fake_kv import held_blocks
from talaria_instance.engine.fake_sequence import FakeSequence
from talaria_instance.engine.protocol import (
    CallProgress,
    FinishReason,
    Quantum,
    StepReport,
    StopReason,
)

if TYPE_CHECKING:
    from talaria_instance.engine.fake import FakeEngine

FAULT_TOKENS: Final = 3
"""Tokens that a faulty call emits before it fails."""


@dataclass
class _Progress:
    new_tokens: int = 0
    prefilled_tokens: int = 0
    remaining_prefill: int = 0
    finish: FinishReason | None = None
    failed: str | None = None
    is_aborted: bool = False


class FakeRun:
    """Drives the active model's sequences until a bound of the quantum is reached."""

    def __init__(self, engine: FakeEngine, quantum: Quantum) -> None:
        self.is_woken = False
        self.restoring: frozenset[bytes] = frozenset()
        """Host blocks that are being copied now."""
        self._engine = engine
        self._quantum = quantum
        self._started_s = engine.clock.now_s()
        self._calls: dict[CallKey, _Progress] = {}
        self._has_ended = False
        self._iterations = 0
        self._prefill_s = self._decode_s = self._restore_s = 0.0
        self._prefill_tokens = self._decode_tokens = self._restored_tokens = 0

    async def go(self) -> StepReport:
        await self._resume()
        while (stop := self._boundary()) is None:
            if self._prefill_budget and self._prefilling():
                await self._prefill()
            else:
                await self._decode()
        return self._report(stop)

    # --- boundaries ---

    def _boundary(self) -> StopReason | None:
        """Carry out aborts; the reason to stop, if there is one."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.is_aborting:
                self._progress(sequence).is_aborted = True
                self._end(sequence)
        if self._has_ended:
            return "finished"
        if self.is_woken:
            return "woken"
        if self._engine.clock.now_s() - self._started_s >= self._quantum.max_s:
            return "bound"
        is_prefilling = self._prefilling()
        if is_prefilling and self._prefill_budget:
            return None
        if self._decoding():
            return "bound" if self._iterations >= self._quantum.max_decode_iterations else None
        return "bound" if is_prefilling else "idle"

    @property
    def _running(self) -> list[FakeSequence]:
        return self._engine.running[self._quantum.model]

    @property
    def _waiting(self) -> list[FakeSequence]:
        return self._engine.waiting[self._quantum.model]

    @property
    def _prefill_budget(self) -> int:
        left = self._quantum.max_prefill_tokens - self._prefill_tokens
        return min(left, self._engine.config.prefill_chunk_tokens)

    def _prefilling(self) -> bool:
        """There is a prefill to begin or to go on with."""
        if any(s.remaining_prefill for s in self._running):
            return True
        return bool(self._waiting) and self._fits(self._waiting[0])

    def _fits(self, sequence: FakeSequence) -> bool:
        return sequence.call.blocks_needed <= self._engine.blocks_free

    def _decoding(self) -> list[FakeSequence]:
        return [s for s in self._running if not s.remaining_prefill]

    def _progress(self, sequence: FakeSequence) -> _Progress:
        return self._calls.setdefault(
            sequence.call.key, _Progress(remaining_prefill=sequence.remaining_prefill)
        )

    def _end(
        self,
        sequence: FakeSequence,
        *,
        finish: FinishReason | None = None,
        failed: str | None = None,
    ) -> None:
        progress = self._progress(sequence)
        progress.finish, progress.failed = finish, failed
        progress.remaining_prefill = sequence.remaining_prefill
        self._engine.end(sequence, finish=finish, failed=failed)
        self._has_ended = True

    async def _sleep(self, seconds: float) -> float:
        """Let engine time pass; returns what passed."""
        before_s = self._engine.clock.now_s()
        await self._engine.sleep(seconds)
        return self._engine.clock.now_s() - before_s

    # --- steps ---

    async def _resume(self) -> None:
        """Bring the KV of paused sequences back."""
        paused = [s for s in self._running if s.is_offloaded and not s.is_aborting]
        tokens = sum(s.computed for s in paused)
        if tokens:
            self._restore_s += await self._sleep(tokens * self._engine.config.restore_token_s)
        for sequence in paused:
            if not sequence.is_over:
                sequence.is_offloaded = False
                self._engine.device.take(sequence.hashes)

    async def _prefill(self) -> None:
        """Compute one chunk: prompts that have begun first, then those that wait and fit."""
        budget = self._prefill_budget
        chunk: list[tuple[FakeSequence, int]] = []
        for sequence in [s for s in self._running if s.remaining_prefill] + self._waiting[:]:
            if not budget:
                break
            if not sequence.is_started:
                if not self._fits(sequence):
                    break
                await self._begin(sequence)
            if sequence.is_over:
                continue
            count = min(budget, sequence.remaining_prefill)
            chunk.append((sequence, count))
            budget -= count
        config = self._engine.config
        total = sum(count for _, count in chunk)
        spent_s = await self._sleep(config.prefill_fixed_s + total * config.prefill_token_s)
        self._prefill_s += spent_s
        self._prefill_tokens += total
        for sequence, count in chunk:
            if sequence.is_over:
                continue
            self._progress(sequence).prefilled_tokens += count
            self._compute(sequence, count)
            self._progress(sequence).remaining_prefill = sequence.remaining_prefill
            if not sequence.remaining_prefill and not sequence.is_aborting:
                self._engine.sink.first_token(sequence.call.key, sequence.cached_tokens)
                self._generate(sequence)

    async def _begin(self, sequence: FakeSequence) -> None:
        """Give a waiting call its blocks and what it can reuse."""
        engine, block_tokens = self._engine, self._engine.config.block_tokens
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.is_started = True
        hashes = sequence.payload.hashes[: (sequence.call.prompt_tokens - 1) // block_tokens]
        on_device = held_blocks(hashes, engine.device)
        on_host = held_blocks(hashes[on_device:], engine.host)
        reused = hashes[: on_device + on_host]
        self._take(sequence, reused)
        if on_host:
            tokens = on_host * block_tokens
            engine.host.touch(reused)
            self.restoring = frozenset(reused[on_device:])
            spent_s = await self._sleep(tokens * engine.config.restore_token_s)
            self.restoring = frozenset()
            self._restore_s += spent_s
            self._restored_tokens += tokens
            if not sequence.is_over:
                engine.sink.restored(sequence.call.key, spent_s, tokens)

    def _take(self, sequence: FakeSequence, reused: Sequence[bytes]) -> None:
        sequence.hashes = list(reused)
        sequence.computed = len(reused) * self._engine.config.block_tokens
        sequence.cached_tokens = sequence.computed
        self._engine.device.take(reused)
        self._engine.device.trim(self._engine.blocks_free)

    def _compute(self, sequence: FakeSequence, count: int) -> None:
        filled = sequence.compute(count, self._engine.config.block_tokens)
        self._engine.device.take(filled)

    async def _decode(self) -> None:
        """One token for each sequence whose prompt is computed."""
        batch = self._decoding()
        config = self._engine.config
        more = config.decode_sequence_share * (len(batch) - 1)
        self._decode_s += await self._sleep(config.decode_step_s * (1 + more))
        self._iterations += 1
        for sequence in batch:
            if not sequence.is_over and not sequence.is_aborting:
                self._compute(sequence, 1)
                self._decode_tokens += 1
                self._generate(sequence)

    def _generate(self, sequence: FakeSequence) -> None:
        finish = sequence.generate(self._engine.sink)
        self._progress(sequence).new_tokens += 1
        if finish is not None:
            self._end(sequence, finish=finish)
        elif sequence.payload.is_faulty and sequence.generated >= FAULT_TOKENS:
            self._end(sequence, failed="a scripted fault")

    def _report(self, stop: StopReason) -> StepReport:
        return StepReport(
            model=self._quantum.model,
            stop=stop,
            iterations=self._iterations,
            seconds=self._engine.clock.now_s() - self._started_s,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            restore_s=self._restore_s,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            restored_tokens=self._restored_tokens,
            calls=tuple(
                CallProgress(
                    key=key,
                    new_tokens=p.new_tokens,
                    prefilled_tokens=p.prefilled_tokens,
                    remaining_prefill=p.remaining_prefill,
                    finish=p.finish,
                    failed=p.failed,
                    is_aborted=p.is_aborted,
                )
                for key, p in self._calls.items()
            ),
            blocks_free=self._engine.blocks_free,
        )
