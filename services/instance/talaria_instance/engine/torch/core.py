"""The engine's own thread: commands in, tokens out. IO (device, clock).

All state of calls and device belongs to whoever holds the core: the engine thread during a
command, else the caller of `abort`. What comes while a command runs waits in the inbox for the
next boundary.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from talaria_common.errors import InvariantBroken
from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import (
    EngineCall,
    FinishReason,
    Quantum,
    Sink,
    StepReport,
    StopReason,
    SwitchRecord,
)
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.loaded import LoadedModel
from talaria_instance.engine.torch.residence import Residence
from talaria_instance.engine.torch.sampler import TokenSampler
from talaria_instance.engine.torch.sequence import Prepared, RunningCall
from talaria_instance.engine.torch.steps import Stepper
from talaria_instance.engine.torch.stream import CallStream
from talaria_instance.engine.torch.tally import RunTally

log = logging.getLogger(__name__)

CLOSED = "the engine was closed"
CPU_SLICE_TOKENS = 128


class EngineCore:
    """Calls, device and the run loop; blocking, one command at a time."""

    def __init__(
        self,
        config: TorchConfig,
        models: dict[str, LoadedModel],
        residence: Residence,
        sink: Sink,
    ) -> None:
        self.models = models
        self.residence = residence
        self.is_closed = False
        self._config = config
        self._sink = sink
        self._stepper = Stepper(residence, config.max_batch, self._end)
        self._calls: dict[CallKey, RunningCall] = {}
        self._order = itertools.count()
        self._gate = threading.RLock()
        self._is_busy = False
        self._inbox: deque[Callable[[RunTally | None], None]] = deque()
        self._is_woken = threading.Event()
        whole = config.prefill_chunk_tokens
        on_cpu = min(CPU_SLICE_TOKENS, whole)
        default = on_cpu if residence.device.type == "cpu" else whole
        self._slice_tokens = config.prefill_slice_tokens or default

    # --- from any thread ---

    def admit(self, calls: Sequence[EngineCall]) -> None:
        """Queue prefills; raises InvariantBroken for a key that is known."""
        for call in calls:
            if call.key in self._calls:
                raise InvariantBroken(f"call {call.key} is admitted twice")
            running = self._running_call(call)
            self._calls[call.key] = running
            if self.is_closed:
                self._end(running, None, CLOSED, None)
            else:
                self._soon(partial(self._enter, running))

    def abort(self, key: CallKey) -> bool:
        """Stop a call at the next boundary, or now if no command runs; False: unknown."""
        call = self._calls.get(key)
        if call is None:
            return False
        self._soon(partial(self._end, call, None, None))
        return True

    def wake(self) -> None:
        """Make the run that is in progress return at its next boundary."""
        self._is_woken.set()

    def clear_wake(self) -> None:
        """A new run is about to start."""
        self._is_woken.clear()

    # --- commands, in the engine thread ---

    def activate(self, model: str) -> SwitchRecord:
        """Make a model active."""
        if self.residence.active is self.models[model]:
            return SwitchRecord(model=model, seconds=0.0, path="none")
        with _Busy(self), torch.inference_mode():
            return self.residence.activate(self.models[model])

    def run(self, quantum: Quantum) -> StepReport:
        """Steps until a bound of the quantum is reached."""
        model = self.residence.active
        if model is None or model.entry.id != quantum.model:
            raise InvariantBroken(f"{quantum.model} runs while another model is active")
        tally = RunTally(quantum, time.monotonic())
        with _Busy(self), torch.inference_mode():
            try:
                stop = self._loop(model, tally)
            except Exception as error:
                log.exception("a run of %s failed", quantum.model)
                stop = "finished"
                self._fail_all(model, f"the engine failed: {error}", tally)
            for call in model.calls:
                call.stream.flush()
        self.residence.collect()
        return tally.report(stop, time.monotonic(), self.residence.pool.unowned)

    def close(self) -> None:
        """End all calls as failed and stop the transfer thread; idempotent."""
        self.is_closed = True
        self._take_inbox(None)
        for call in list(self._calls.values()):
            self._end(call, None, CLOSED, None)
        self.residence.close()

    # --- inside ---

    def _loop(self, model: LoadedModel, tally: RunTally) -> StopReason:
        in_chunk = 0
        while (stop := self._boundary(model, tally)) is None:
            chunk = self._config.prefill_chunk_tokens - in_chunk
            budget = min(self._slice_tokens, chunk, tally.prefill_left)
            self._stepper.place(model, budget, tally)
            done = self._stepper.prefill(model, budget, tally) if budget > 0 else 0
            in_chunk += done
            if tally.has_ended:
                continue
            if done and in_chunk < self._config.prefill_chunk_tokens and tally.prefill_left:
                continue
            in_chunk = 0
            has_decoded = tally.may_decode and self._stepper.decode(model, tally)
            if not done and not has_decoded and not tally.has_ended:
                return "bound" if model.calls else "idle"
        return stop

    def _boundary(self, model: LoadedModel, tally: RunTally) -> StopReason | None:
        """Take in what came meanwhile; the reason to stop, if there is one."""
        self._take_inbox(tally)
        if self.is_closed or tally.has_ended:
            return "finished"
        if self._is_woken.is_set():
            return "woken"
        if not model.calls:
            return "idle"
        if tally.is_late(time.monotonic()):
            return "bound"
        is_prefilling = any(c.remaining_prefill for c in model.calls)
        if tally.may_decode or (is_prefilling and tally.prefill_left):
            return None
        return "bound"

    def _fail_all(self, model: LoadedModel, reason: str, tally: RunTally) -> None:
        """End the calls that were on the device, and start over with an empty one."""
        placed = [c for c in model.calls if c.is_placed]
        for call in placed or list(model.calls):
            call.blocks = []
            self._end(call, None, reason, tally)
        self.residence.reset()

    def _running_call(self, call: EngineCall) -> RunningCall:
        prepared: Prepared = call.payload
        text = self.models[call.model].text
        sampling = prepared.prompt.sampling
        return RunningCall(
            call=call,
            order=next(self._order),
            prepared=prepared,
            output=text.output(prepared.prompt),
            eos_ids=text.eos_ids,
            sampler=TokenSampler(sampling, text.eos_ids),
            stream=CallStream(call.key, self._sink),
            tokens=list(prepared.prompt.tokens),
            digests=list(prepared.digests),
        )

    def _enter(self, call: RunningCall, _: RunTally | None) -> None:
        if not call.stream.is_over:
            self.models[call.call.model].calls.append(call)

    def _end(
        self,
        call: RunningCall,
        finish: FinishReason | None,
        failed: str | None,
        tally: RunTally | None,
    ) -> None:
        if self._calls.pop(call.key, None) is None:
            return
        calls = self.models[call.call.model].calls
        if call in calls:
            calls.remove(call)
        try:
            self.residence.end(call)
        finally:
            call.stream.end(finish, failed, call.generated)
            if tally is not None:
                tally.ended(call, finish, failed)

    def _soon(self, act: Callable[[RunTally | None], None]) -> None:
        """Now if no command runs, else at its next boundary."""
        with self._gate:
            if self._is_busy:
                self._inbox.append(act)
            else:
                act(None)

    def _take_inbox(self, tally: RunTally | None) -> None:
        while self._inbox:
            self._inbox.popleft()(tally)

    def hold(self) -> None:
        """A command begins."""
        with self._gate:
            self._is_busy = True

    def let_go(self) -> None:
        """A command ends; what came too late for its last boundary happens now."""
        with self._gate:
            self._take_inbox(None)
            self._is_busy = False


class _Busy:
    """A command of the core is running."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        self._core.hold()

    def __exit__(self, *error: object) -> None:
        self._core.let_go()
