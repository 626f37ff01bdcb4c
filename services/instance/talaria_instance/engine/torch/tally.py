"""What one run did, gathered while it goes on. Pure."""

from __future__ import annotations

import msgspec

from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import (
    CallProgress,
    FinishReason,
    Quantum,
    StepReport,
    StopReason,
)
from talaria_instance.engine.torch.sequence import RunningCall


class RunTally:
    """Counts of one run."""

    def __init__(self, quantum: Quantum, started_s: float) -> None:
        self.quantum = quantum
        self.started_s = started_s
        self.iterations = 0
        self.prefill_s = self.decode_s = self.restore_s = 0.0
        self.prefill_tokens = self.decode_tokens = self.restored_tokens = 0
        self.has_ended = False
        """Some call is over."""
        self._calls: dict[CallKey, CallProgress] = {}

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that may still be computed."""
        return max(0, self.quantum.max_prefill_tokens - self.prefill_tokens)

    @property
    def may_decode(self) -> bool:
        return self.iterations < self.quantum.max_decode_iterations

    def is_late(self, now_s: float) -> bool:
        return now_s - self.started_s >= self.quantum.max_s

    def placed(self, call: RunningCall) -> None:
        """A call got its blocks; what it got from the host counts as restore."""
        if call.restored_tokens:
            self.restored_tokens += call.restored_tokens
            self.restore_s += call.restored_s
            call.restored_tokens, call.restored_s = 0, 0.0

    def prefilled(self, call: RunningCall, tokens: int) -> None:
        self.prefill_tokens += tokens
        before = self._of(call.key)
        self._set(
            before,
            prefilled_tokens=before.prefilled_tokens + tokens,
            remaining_prefill=call.remaining_prefill,
        )

    def generated(self, call: RunningCall) -> None:
        before = self._of(call.key)
        self._set(before, new_tokens=before.new_tokens + 1, remaining_prefill=0)

    def ended(self, call: RunningCall, finish: FinishReason | None, failed: str | None) -> None:
        self.has_ended = True
        is_aborted = finish is None and failed is None
        self._set(self._of(call.key), finish=finish, failed=failed, is_aborted=is_aborted)

    def report(self, stop: StopReason, now_s: float, blocks_free: int) -> StepReport:
        return StepReport(
            model=self.quantum.model,
            stop=stop,
            iterations=self.iterations,
            seconds=now_s - self.started_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            restore_s=self.restore_s,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            restored_tokens=self.restored_tokens,
            calls=tuple(self._calls.values()),
            blocks_free=blocks_free,
        )

    def _of(self, key: CallKey) -> CallProgress:
        return self._calls.get(key) or CallProgress(key=key)

    def _set(self, progress: CallProgress, **changes: object) -> None:
        self._calls[progress.key] = msgspec.structs.replace(progress, **changes)
