"""Accepted calls, from acceptance to their one end: the shell around the scheduler. IO.

    accept ──▶ scheduler ──▶ engine ──▶ sink ──▶ outlet
                   ▲            │                   │
                   └─ reports ──┘        Ended, CallEnded, spans, metrics

Everything here runs on the event loop and none of it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

from talaria_common import subjects
from talaria_common.bus import Subscription
from talaria_common.clock import Clock
from talaria_common.policies import PolicySet
from talaria_common.service import Recorder, Shell
from talaria_common.telemetry import Telemetry
from talaria_common.wire import (
    CallEnded,
    CallKey,
    Ended,
    EndReason,
    ErrorInfo,
    Usage,
)
from talaria_instance.calls import Call, CallBook
from talaria_instance.config import InstanceConfig
from talaria_instance.driver import EngineDriver
from talaria_instance.engine.protocol import Engine, EngineCall, FinishReason
from talaria_instance.events import (
    Activate,
    Admit,
    CallAborted,
    CallQueued,
    CancelWake,
    Effect,
    Event,
    Interrupt,
    Parked,
    RoundPlanned,
    Run,
    SlotClosed,
    SlotOpened,
    Stepped,
    Switched,
    WakeAt,
)
from talaria_instance.facts import timings_of
from talaria_instance.kv_news import KvNews
from talaria_instance.ledger import Ledger
from talaria_instance.outlet import Outlet
from talaria_instance.prefixes import PrefixTable
from talaria_instance.reports import CallSpans, InstanceMetrics, Place, a_slot_report
from talaria_instance.scheduler import Scheduler
from talaria_instance.sink import (
    BlocksDropped,
    BlocksSaved,
    CallOver,
    LoopSink,
    Output,
    PromptComputed,
    Restored,
    Text,
)

_log = logging.getLogger(__name__)

OUTPUT_TOKENS: Final = 128
"""Expected output of a model's first call."""
OUTPUT_WEIGHT: Final = 0.1
"""Weight of a finished call in its model's expected output."""
FAILURES_MAX: Final = 3
"""Engine commands failing in a row that make the instance not ready."""


class Serving:
    """Runs accepted calls on one engine."""

    def __init__(
        self,
        place: Place,
        *,
        config: InstanceConfig,
        policy: PolicySet,
        models: tuple[str, ...],
        clock: Clock,
        telemetry: Telemetry,
        engine: Engine,
        sink: LoopSink,
        book: CallBook,
        outlet: Outlet,
        record_to: Path | None,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` hears of what a snapshot should tell at once."""
        self._place = place
        self._clock = clock
        self._engine = engine
        self._sink = sink
        self._book = book
        self._outlet = outlet
        self._on_change = on_change
        self.metrics = InstanceMetrics(telemetry)
        self.scheduler = Scheduler(config, policy, models)
        self.prefixes = PrefixTable(config.prefixes_max, engine.locality)
        self.driver = EngineDriver(
            engine,
            sink,
            clock,
            on_event=self._apply_raising,
            on_failure=self._engine_failed,
            on_broken=self._broke,
        )
        self.is_broken = False
        self._spans = CallSpans(telemetry, place)
        self.kv = KvNews(place, outlet, self._spans, clock)
        recorder = None if record_to is None else Recorder(record_to)
        self._shell: Shell[Effect] = Shell(self.scheduler.step, self._perform, clock, recorder)
        self._expected: dict[str, float] = dict.fromkeys(models, float(OUTPUT_TOKENS))
        self._failures = 0

    @property
    def is_healthy(self) -> bool:
        """The engine does what it is told."""
        return not self.is_broken and self._failures < FAILURES_MAX

    def start(self) -> None:
        """Begin, on a started engine."""
        self._sink.attach(self.on_output)
        for timing in timings_of(self._engine.facts()):
            self._apply(timing)
        self.driver.start()
        self.metrics.calls(self.scheduler)

    async def close(self) -> None:
        """Stop driving the engine; what is recorded is on disk afterwards."""
        await self.driver.close()
        self._shell.close()

    # --- calls ----------------------------------------------------------------------------------

    def accept(
        self, call: Call, prepared: EngineCall, expected: int, listening: tuple[str, Subscription]
    ) -> None:
        """Queue a checked call; earlier attempts at it end first. `expected` output, 0: unknown."""
        for earlier in self._book.lower_attempts(call.key):
            self.end(earlier, EndReason.SUPERSEDED)
        # First: an engine that has just gone raises here, before anything is held.
        where = self._engine.locality(prepared)
        now_s = self._clock.now_s()
        call.prepared = prepared
        call.ledger = Ledger(now_s)
        slot = self.scheduler.slot
        if slot is not None and slot.model == call.model and not slot.is_open:
            call.ledger.switching(now_s)
        run = call.run
        self._outlet.open(call.key, run.inbox, run.encoding, run.notify, listening)
        event = CallQueued(
            key=call.key,
            model=call.model,
            prompt_tokens=prepared.prompt_tokens,
            device_tokens=where.device_tokens,
            host_tokens=where.host_tokens,
            output_tokens=expected or round(min(prepared.max_tokens, self._expected[call.model])),
            blocks=prepared.blocks_needed,
            is_continuation=run.is_continuation,
        )
        self._apply(event)
        self.metrics.calls(self.scheduler)
        self._on_change()

    def end(
        self,
        call: Call,
        reason: EndReason,
        *,
        finish: FinishReason | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        """Say the last word on an accepted call, once; whatever the engine still says is ignored."""
        if call.ledger is None or call.prepared is None or call.key not in self._book.live:
            return
        now_s = self._clock.now_s()
        run, is_finished = call.run, reason is EndReason.FINISHED
        usage = Usage(
            prompt_tokens=call.prepared.prompt_tokens,
            completion_tokens=call.tokens,
            cached_tokens=call.cached_tokens,
        )
        parts = call.ledger.end(now_s)
        reply = b""
        if is_finished and run.tail is not None and run.endpoint == "chat":
            reply = call.reply.digest(run.tail.digest)
        ended = CallEnded(
            grant=run.grant,
            tenant=run.tenant,
            session=run.session,
            call_index=run.call_index,
            tail=run.tail,
            reply=reply,
            reason=reason,
            usage=usage,
            parts=parts,
            prefix_tier="device" if is_finished else "absent",
            is_final=run.is_final,
        )
        final = Ended(
            key=call.key,
            seq=0,
            reason=reason,
            finish_reason=finish,
            usage=usage,
            parts=parts,
            ttft_s=call.ledger.first_token_s,
            error=error,
            session=run.session,
        )
        self._book.end(call, ended, now_s)
        self._outlet.end(ended, final)
        if is_finished:
            self._learn(call, call.prepared, reply)
        else:
            self._engine.abort(call.key)
            self._apply(CallAborted(key=call.key))
        self._spans.ended(call, self._clock.unix_s() - now_s)
        self.metrics.ended(ended)
        self.metrics.calls(self.scheduler)
        self._on_change()

    def end_all(self, reason: EndReason, error: ErrorInfo) -> None:
        """End every accepted call."""
        for call in list(self._book.live.values()):
            self.end(call, reason, error=error)

    def end_overdue(self) -> None:
        """End calls that still wait past their deadline."""
        for call in list(self._book.live.values()):
            deadline_s = call.run.deadline_s
            if deadline_s is None or call.ledger is None or call.is_admitted:
                continue
            if self._clock.now_s() - call.arrived_s > deadline_s:
                detail = f"not started within {deadline_s:g} s"
                error = ErrorInfo(code="deadline_exceeded", detail=detail)
                self.end(call, EndReason.FAILED, error=error)

    def _learn(self, call: Call, prepared: EngineCall, reply: bytes) -> None:
        old = self._expected[call.model]
        self._expected[call.model] = old + OUTPUT_WEIGHT * (call.tokens - old)
        if reply:
            self.prefixes.reply(_session_of(call), prepared, reply, call.tokens)
        self.kv.finished(call)

    # --- the engine's output --------------------------------------------------------------------

    def on_output(self, output: Output) -> None:
        """Take one piece of output, on the loop."""
        match output:
            case BlocksSaved(blocks=blocks):
                self.kv.saved(blocks)
            case BlocksDropped(prefixes=prefixes):
                self.kv.dropped(prefixes)
            case Restored() | PromptComputed() | Text() | CallOver():
                call = self._book.live.get(output.key)
                if call is not None and call.ledger is not None:
                    self._on_call_output(call, call.ledger, output)
            case _:
                assert_never(output)

    def _on_call_output(
        self, call: Call, ledger: Ledger, output: Restored | PromptComputed | Text | CallOver
    ) -> None:
        now_s = self._clock.now_s()
        match output:
            case Restored(seconds=seconds, tokens=tokens):
                call.restored_tokens = tokens
                ledger.restored(now_s, seconds)
            case PromptComputed(cached_tokens=cached_tokens):
                call.has_token = True
                call.cached_tokens = cached_tokens
                ledger.first_token(now_s)
                self._outlet.first_token(call.key)
                if call.run.tail is not None and call.prepared is not None:
                    digest = call.run.tail.digest
                    self.prefixes.prompt(_session_of(call), digest, call.prepared)
            case Text():
                call.tokens += output.tokens
                call.reply.add(output.text, output.tool_calls)
                self._outlet.text(call.key, output.text, output.tool_calls, output.tokens)
            case CallOver(finish=finish, failed=failed, tokens=tokens):
                call.tokens = tokens
                if finish is not None:
                    self.end(call, EndReason.FINISHED, finish=finish)
                else:
                    detail = failed or "the engine ended the call"
                    error = ErrorInfo(code="model_failed", detail=detail)
                    self.end(call, EndReason.FAILED, error=error)
            case _:
                assert_never(output)

    # --- the scheduler's decisions --------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        now_s = self._clock.now_s()
        match effect:
            case Activate(model=model):
                for ledger in self._accepted(model):
                    ledger.switching(now_s)
                self.driver.command(effect)
            case Run():
                self.driver.command(effect)
            case Interrupt():
                # Behind the driver's own step: a command handed over just now has begun by then.
                asyncio.get_running_loop().call_soon(self._engine.wake)
            case WakeAt(at_s=at_s):
                self.driver.wake_at(at_s)
            case CancelWake():
                self.driver.cancel_wake()
            case SlotOpened(model=model, resumed=resumed):
                for ledger in self._accepted(model):
                    ledger.switched(now_s)
                for key in resumed:
                    self._ledger(key, Ledger.running, now_s)
                self._on_change()
            case Admit(keys=keys):
                self._admit(keys, now_s)
                self.metrics.decided(effect)
            case SlotClosed(paused=paused):
                for key in paused:
                    self._ledger(key, Ledger.paused, now_s)
                report = a_slot_report(self._place.instance, effect, self._clock.unix_s())
                self._outlet.post(subjects.slots(self._place.instance), report)
                self.metrics.decided(effect)
                self._on_change()
            case Parked() | RoundPlanned():
                self.metrics.decided(effect)
            case _:
                assert_never(effect)

    def _accepted(self, model: str) -> list[Ledger]:
        return [
            call.ledger
            for call in self._book.live.values()
            if call.model == model and call.ledger is not None
        ]

    def _ledger(self, key: CallKey, change: Callable[[Ledger, float], None], now_s: float) -> None:
        call = self._book.live.get(key)
        if call is not None and call.ledger is not None:
            change(call.ledger, now_s)

    def _admit(self, keys: tuple[CallKey, ...], now_s: float) -> None:
        admitted: list[EngineCall] = []
        for key in keys:
            call = self._book.live.get(key)
            if call is not None and call.prepared is not None and call.ledger is not None:
                call.is_admitted = True
                call.ledger.running(now_s)
                admitted.append(call.prepared)
        self._engine.admit(admitted)
        self.metrics.calls(self.scheduler)

    def _apply(self, event: Event) -> None:
        try:
            self._apply_raising(event)
        except Exception as error:  # the state is no longer trusted
            self._broke(error)

    def _apply_raising(self, event: Event) -> None:
        if self.is_broken:
            return
        self._shell.apply(event)
        if isinstance(event, Stepped | Switched):
            self._failures = 0

    def _engine_failed(self, model: str, detail: str) -> None:
        """The engine raised: the calls that it holds for the model end, the others wait on."""
        self._failures += 1
        error = ErrorInfo(code="model_failed", detail=f"{model}: {detail}")
        is_switch = self.scheduler.slot is not None and not self.scheduler.slot.is_open
        for call in list(self._book.live.values()):
            if call.model == model and (call.is_admitted or is_switch):
                self.end(call, EndReason.FAILED, error=error)
        self._on_change()

    def _broke(self, error: Exception) -> None:
        """A bug: end all calls and take no more."""
        _log.critical("the scheduler is broken", exc_info=error)
        self.is_broken = True
        self.end_all(EndReason.FAILED, ErrorInfo(code="internal", detail=str(error)))
        self._on_change()


def _session_of(call: Call) -> tuple[str, str, str]:
    return call.run.tenant, call.run.session, call.model
