"""Which calls a step of the torch engine takes, and how their output reaches the sink."""

from __future__ import annotations

from typing import Any

from talaria_common.wire import CallKey
from talaria_instance.engine.protocol import EngineCall, Quantum
from talaria_instance.engine.torch.sampler import TokenSampler
from talaria_instance.engine.torch.sequence import (
    Prepared,
    RunningCall,
    decode_batch,
    prefill_share,
)
from talaria_instance.engine.torch.stream import COALESCE_S, CallStream
from talaria_instance.engine.torch.tally import RunTally
from talaria_instance.engine.torch.text import Piece, Prompt, Sampling

KEY = CallKey("c")


class HeardSink:
    """Keeps what it is told, as (method, arguments after the key)."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda key, *args: self.heard.append((name, *args))

    def names(self) -> list[str]:
        return [name for name, *_ in self.heard]


class NoOutput:
    has_tool_calls = False

    def push(self, token: int) -> Piece:
        return Piece()

    def finish(self) -> Piece:
        return Piece()

    def allowed_mask(self) -> None:
        return None


def a_call(
    order: int, *, prompt: int = 10, generated: int = 0, computed: int = 0, blocks: int = 1
) -> RunningCall:
    """A placed call, unless `blocks` is 0."""
    key, sampling = CallKey(f"c{order}"), Sampling(max_tokens=8)
    tokens = tuple(range(prompt))
    return RunningCall(
        call=EngineCall(key=key, model="m", prompt_tokens=prompt, max_tokens=8, blocks_needed=2),
        order=order,
        prepared=Prepared(Prompt(tokens=tokens, sampling=sampling), b"", (), ""),
        output=NoOutput(),
        eos_ids=frozenset(),
        sampler=TokenSampler(sampling, ()),
        stream=CallStream(key, HeardSink()),
        tokens=[*tokens, *range(generated)],
        digests=[],
        blocks=list(range(blocks)),
        computed=computed,
    )


# --- what a step takes --------------------------------------------------------------------------


def test_only_calls_with_one_token_to_go_decode() -> None:
    fresh = a_call(0)
    # Its whole prompt but the last token is cached: the first token comes from a prefill.
    cached = a_call(1, computed=9)
    running = a_call(2, generated=3, computed=12)
    again = a_call(3, generated=3, computed=4)
    waiting = a_call(4, generated=3, blocks=0)
    assert decode_batch([fresh, cached, running, again, waiting]) == [running]


def test_a_decode_batch_has_like_lengths_side_by_side() -> None:
    calls = [a_call(n, generated=1, computed=10, blocks=b) for n, b in enumerate((2, 9, 3, 9))]
    assert [c.order for c in decode_batch(calls)] == [1, 3, 2, 0]


def test_a_prefill_is_shared_in_order_up_to_its_budget() -> None:
    first, second, third = a_call(0, computed=4), a_call(1), a_call(2)
    decoding, waiting = a_call(3, generated=1, computed=10), a_call(4, blocks=0)
    calls = [first, decoding, waiting, second, third]
    assert prefill_share(calls, 8) == [(first, 6), (second, 2)]
    assert prefill_share(calls, 0) == []


def test_a_resumed_call_recomputes_what_its_copies_lack() -> None:
    again = a_call(0, generated=3, computed=4)
    assert again.remaining_prefill == 9
    assert prefill_share([again], 100) == [(again, 9)]


# --- output -------------------------------------------------------------------------------------


def test_the_first_text_goes_at_once_and_the_next_are_gathered() -> None:
    sink = HeardSink()
    stream = CallStream(KEY, sink)
    stream.begin(3)
    for n in range(3):
        stream.push(Piece("abc"[n]), 1, n * COALESCE_S / 2)
    stream.push(Piece("d"), 1, 1.1 * COALESCE_S)
    assert sink.heard == [("first_token", 3), ("text", "a", (), 1), ("text", "bc", (), 2)]
    stream.end("stop", None, 4)
    assert sink.heard[3:] == [("text", "d", (), 1), ("ended", "stop", None, 4)]


def test_tokens_without_text_are_counted_with_the_next_text() -> None:
    sink = HeardSink()
    stream = CallStream(KEY, sink)
    stream.push(Piece(), 1, 0.0)
    stream.push(Piece("x"), 1, 0.0)
    assert sink.heard == [("text", "x", (), 2)]


def test_an_aborted_call_ends_without_further_text_and_only_once() -> None:
    sink = HeardSink()
    stream = CallStream(KEY, sink)
    stream.push(Piece("a"), 1, 0.0)
    stream.push(Piece("b"), 1, 0.0)
    stream.end(None, None, 2)
    stream.end("stop", None, 2)
    assert sink.names() == ["text", "ended"]


def test_a_restore_is_told_once_and_not_after_the_first_token() -> None:
    sink = HeardSink()
    stream = CallStream(KEY, sink)
    stream.restored(0.1, 16)
    stream.restored(0.2, 32)
    stream.begin(16)
    stream.begin(16)
    stream.restored(0.3, 48)
    assert sink.names() == ["restored", "first_token"]


# --- report -------------------------------------------------------------------------------------


def test_a_report_tells_each_call_once() -> None:
    quantum = Quantum(model="m", max_decode_iterations=5, max_prefill_tokens=100, max_s=1.0)
    tally = RunTally(quantum, 10.0)
    call = a_call(0, computed=4)
    tally.prefilled(call, 4)
    call.computed = 10
    tally.prefilled(call, 6)
    tally.generated(call)
    tally.ended(call, None, None)
    report = tally.report("finished", 10.5, 3)
    (progress,) = report.calls
    assert (progress.prefilled_tokens, progress.remaining_prefill) == (10, 0)
    assert (progress.new_tokens, progress.is_aborted) == (1, True)
    assert (report.prefill_tokens, report.seconds, report.blocks_free) == (10, 0.5, 3)
    assert tally.prefill_left == 90
    assert tally.is_late(11.0)
