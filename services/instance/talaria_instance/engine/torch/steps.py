"""Prefill slices and decode iterations of the active model. IO (device).

A failure inside a step ends the calls that it belongs to, and no others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from talaria_instance.engine.protocol import FinishReason
from talaria_instance.engine.torch.loaded import LoadedModel
from talaria_instance.engine.torch.model import Span
from talaria_instance.engine.torch.residence import Residence
from talaria_instance.engine.torch.sequence import RunningCall, decode_batch, prefill_share
from talaria_instance.engine.torch.tally import RunTally
from talaria_instance.engine.torch.text import Piece

log = logging.getLogger(__name__)

Ender = Callable[[RunningCall, FinishReason | None, str | None, RunTally | None], None]
"""(call, finish, failed, tally): say the last word on a call."""


class Stepper:
    """Runs steps and takes their tokens to the calls."""

    def __init__(self, residence: Residence, max_batch: int, end: Ender) -> None:
        self._residence = residence
        self._max_batch = max_batch
        self._end = end

    # --- placing ---

    def place(self, model: LoadedModel, room: int, tally: RunTally) -> None:
        """Give blocks to waiting calls: those that have run before first, oldest first; then new
        ones, in order, as long as the next slice has room for their tokens."""
        begun = [c for c in model.calls if not c.is_placed and (c.generated or c.saved)]
        for call in begun:
            if not self._place(model, call, tally):
                return
        room -= sum(c.remaining_prefill for c in model.calls if c.is_placed)
        for call in [c for c in model.calls if not c.is_placed]:
            if room <= 0 or not self._place(model, call, tally):
                return
            if call.is_placed:
                room -= call.remaining_prefill

    def _place(self, model: LoadedModel, call: RunningCall, tally: RunTally) -> bool:
        """False if the call has to wait; a call that fails does not hold up the next."""
        placed = sum(c.is_placed for c in model.calls)
        if placed >= self._max_batch:
            return False
        try:
            if self._residence.place(call):
                tally.placed(call)
                return True
        except Exception as error:
            self._fail(call, error, tally)
            return True
        if placed == 0:
            self._end(call, None, "its KV does not fit the device", tally)
            return True
        return False

    # --- prefill ---

    def prefill(self, model: LoadedModel, budget: int, tally: RunTally) -> int:
        """Compute up to `budget` prompt tokens in one forward pass; how many it were."""
        slice_ = prefill_share(model.calls, budget)
        if not slice_:
            return 0
        started_s = time.monotonic()
        try:
            done = self._prefill(slice_, tally)
        except Exception as error:
            if len(slice_) == 1:
                self._fail(slice_[0][0], error, tally)
                return 0
            log.warning("a prefill of %d calls failed, each is tried alone", len(slice_))
            done = self._prefill_one_by_one(slice_, tally)
        tally.prefill_s += time.monotonic() - started_s
        return done

    def _prefill_one_by_one(
        self, slice_: Sequence[tuple[RunningCall, int]], tally: RunTally
    ) -> int:
        done = 0
        for call, count in slice_:
            try:
                done += self._prefill([(call, count)], tally)
            except Exception as error:
                self._fail(call, error, tally)
        return done

    def _prefill(self, slice_: Sequence[tuple[RunningCall, int]], tally: RunTally) -> int:
        spans = [
            Span(c.tokens[c.computed : c.computed + n], c.computed, c.blocks) for c, n in slice_
        ]
        logits = self._residence.decoder.forward(spans)
        rows = []
        for row, (call, count) in enumerate(slice_):
            call.computed += count
            self._residence.settle(call)
            tally.prefilled(call, count)
            if not call.remaining:
                rows.append(row)
        if rows:
            calls = [slice_[row][0] for row in rows]
            self._take_tokens(calls, logits[rows], tally)
        return sum(count for _, count in slice_)

    # --- decode ---

    def decode(self, model: LoadedModel, tally: RunTally) -> bool:
        """One token for each call that is due; False if none is."""
        if not any(c.is_decoding for c in model.calls):
            return False
        started_s = time.monotonic()
        self._make_room(model, tally)
        batch = decode_batch(model.calls)
        if batch:
            logits = self._residence.decoder.forward(
                [Span(c.tokens[-1:], c.computed, c.blocks) for c in batch]
            )
            for call in batch:
                call.computed += 1
                self._residence.settle(call)
            self._take_tokens(batch, logits, tally)
            tally.decode_tokens += len(batch)
        tally.iterations += 1
        tally.decode_s += time.monotonic() - started_s
        return True

    def _make_room(self, model: LoadedModel, tally: RunTally) -> None:
        """A block for each next token; the newest calls give theirs up if there are too few."""
        for call in [c for c in model.calls if c.is_decoding]:
            while call.is_placed and not self._residence.grow(call):
                newest = max((c for c in model.calls if c.is_placed), key=lambda c: c.order)
                if newest is call and sum(c.is_placed for c in model.calls) == 1:
                    self._end(call, None, "its KV does not fit the device", tally)
                    break
                log.info("call %s is preempted: out of KV blocks", newest.key)
                self._residence.preempt(newest)

    # --- tokens ---

    def _take_tokens(
        self, calls: Sequence[RunningCall], logits: torch.Tensor, tally: RunTally
    ) -> None:
        """Choose the next token of each call; `logits` [calls, vocab]."""
        likeliest = logits.argmax(dim=-1).tolist()
        now_s = time.monotonic()
        for row, call in enumerate(calls):
            try:
                allowed = call.output.allowed_mask()
                token = likeliest[row]
                if allowed is not None or not call.sampler.is_plain(call.generated):
                    numbers = logits[row].cpu().numpy()
                    token = call.sampler.pick(numbers, allowed, call.generated)
                self._take_token(call, token, now_s, tally)
            except Exception as error:
                self._fail(call, error, tally)

    def _take_token(self, call: RunningCall, token: int, now_s: float, tally: RunTally) -> None:
        call.tokens.append(token)
        tally.generated(call)
        call.stream.begin(call.cached_tokens or 0)
        is_end = token in call.eos_ids and not call.prepared.prompt.sampling.ignore_eos
        piece = Piece() if is_end else call.output.push(token)
        is_natural = is_end or piece.is_stopped
        is_over = is_natural or call.generated >= call.call.max_tokens
        call.stream.push(piece, 1, now_s)
        if is_over:
            call.stream.push(call.output.finish(), 0, now_s)
            natural: FinishReason = "tool_calls" if call.output.has_tool_calls else "stop"
            self._end(call, natural if is_natural else "length", None, tally)

    def _fail(self, call: RunningCall, error: Exception, tally: RunTally) -> None:
        log.warning("call %s failed in a step", call.key, exc_info=error)
        reason = "out of device memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        self._end(call, None, reason or type(error).__name__, tally)
