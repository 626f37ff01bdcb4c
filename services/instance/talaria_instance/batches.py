"""Which waiting calls enter a slot: P at its opening, SP at a decode boundary (A3). Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from talaria_common.wire import CallKey
from talaria_instance.events import ParkReason
from talaria_instance.rounds import SchedulerConfig, SlotPlan
from talaria_instance.state import ModelQueue, Slot, Waiting

NOTHING: Final[tuple[CallKey, ...]] = ()


class SessionPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the returned continuations."""

    admitted: tuple[CallKey, ...] = NOTHING
    parked: tuple[tuple[CallKey, ParkReason], ...] = ()


def ordinary_batch(
    queue: ModelQueue, plan: SlotPlan, config: SchedulerConfig
) -> tuple[CallKey, ...]:
    """P: waiting calls, in order, while their prefills fit beside protected decode.

    At least one prefill is under way in every slot, however long it is, so that none starves;
    the first that does not fit ends the batch, so that no later one overtakes it.
    """
    timing = queue.timing
    left_s = plan.budget_s - plan.protected_s - queue.prefill_left_s
    blocks, sequences = queue.room(config.batch_max)
    is_prefilling = queue.prefill_left > 0
    batch: list[CallKey] = []
    for key, waiting in queue.waiting.items():
        has_engine_to_itself = not queue.running and not batch
        has_room = waiting.call.blocks <= blocks and sequences > 0
        start_s = waiting.start_s(timing)
        if not (has_room or has_engine_to_itself) or (start_s > left_s and is_prefilling):
            break
        batch.append(key)
        is_prefilling = True
        left_s -= start_s
        blocks -= waiting.call.blocks
        sequences -= 1
    return tuple(batch)


def session_prefill(
    slot: Slot, queue: ModelQueue, config: SchedulerConfig, now_s: float
) -> SessionPrefill:
    """SP: returned continuations in order of arrival, each that fits what is left.

    Eligible is who arrived after P was taken and has its prefix here. Four budgets: seconds beside
    protected decode and prefills under way, KV blocks, sequences, prompt tokens.
    """
    left_s = slot.free_s(now_s) - queue.prefill_left_s
    blocks, sequences = queue.room(config.batch_max)
    tokens = config.sp_prefill_tokens_max
    admitted: list[CallKey] = []
    parked: list[tuple[CallKey, ParkReason]] = []
    for key, waiting in queue.waiting.items():
        if waiting.arrival_n <= slot.p_arrival_n or not waiting.is_returning:
            continue
        start_s = waiting.start_s(queue.timing)
        because = _over_budget(waiting, start_s > left_s, blocks, sequences, tokens)
        if because is not None:
            parked.append((key, because))
            continue
        admitted.append(key)
        left_s -= start_s
        blocks -= waiting.call.blocks
        sequences -= 1
        tokens -= waiting.new_tokens
    return SessionPrefill(admitted=tuple(admitted), parked=tuple(parked))


def _over_budget(
    waiting: Waiting, is_late: bool, blocks: int, sequences: int, tokens: int
) -> ParkReason | None:
    if is_late:
        return ParkReason.TIME
    if waiting.call.blocks > blocks:
        return ParkReason.BLOCKS
    if sequences < 1:
        return ParkReason.BATCH
    return ParkReason.PREFILL_TOKENS if waiting.new_tokens > tokens else None
