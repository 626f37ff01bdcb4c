"""The router's decision: what a call would cost on each instance, and where its home is. Pure.

    Cost(r, i) = dR(r, i) + C_kv(r, i) + C_act(i, m)                  mechanisms A1, equation (1)

in seconds. dR: wait for the model's slot, work ahead in it, rounds that it does not fit into, then
prefill of what is new and the call's share of the decode. C_kv: nothing on the device, a restore
from the host, else a recompute of the prefix that another instance has. C_act: nothing if active,
else the advertised switch. Each is charged once. Admission's account of what was granted since the
snapshot counts as work ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import msgspec

from talaria_common.policies import PolicySet
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    Candidate,
    CostTerms,
    ErrorInfo,
    Granted,
    Home,
    InstanceLoad,
    LoadState,
    Message,
    ModelState,
    NotGranted,
    PlaceCall,
    SessionRow,
    Snapshot,
)
from talaria_router.config import RouterConfig
from talaria_router.state import InstanceView, Match, SessionPlace, Views

FORGET_S: Final = 60.0
"""Silence after which an instance is no longer remembered."""
SWEEP_S: Final = 1.0
"""Least time between two looks at all instances for such."""


class Placed(Message, frozen=True, kw_only=True, tag="placed"):
    """Admission's answer, as it is passed on: where the session is now."""

    tenant: str
    granted: Granted


class RowSeen(Message, frozen=True, kw_only=True, tag="row_seen"):
    """The session table's replica has a row."""

    row: SessionRow


class InstanceLost(Message, frozen=True, kw_only=True, tag="instance_lost"):
    """No responders under the instance's name."""

    instance: str
    boot_id: str


Event: TypeAlias = PlaceCall | Snapshot | LoadState | CallEnded | Placed | RowSeen | InstanceLost
Effect: TypeAlias = AdmitCall | NotGranted


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates, cheapest first; `error` if there is nobody to ask for."""

    candidates: tuple[Candidate, ...] = ()
    home: Home | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """A call's predicted tokens."""

    prompt: int
    known: int
    """Of the prompt, reusable on some instance."""
    output: int

    @property
    def new(self) -> int:
        return max(1, self.prompt - self.known)


class Router:
    """Keeps the view and ranks calls; sends nothing and accounts for nothing."""

    def __init__(self, config: RouterConfig, policy: PolicySet) -> None:
        self._config = config
        self._lease_s = policy.lease_charge_s if policy.lease_tau_s > 0 else 0.0
        self._linger_s = policy.linger_s
        self._sweep_due_s = 0.0
        self.views = Views(
            tokens_per_byte=config.tokens_per_byte,
            output_tokens=config.output_tokens,
            sessions_max=config.sessions_max,
        )

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Take a report, or decide what to ask admission for a call."""
        views = self.views
        match event:
            case PlaceCall():
                ranking = self.rank(event, now_s)
                if ranking.error is not None:
                    return [NotGranted(key=event.key, error=ranking.error)]
                question = AdmitCall(
                    place=event,
                    ranked=ranking.candidates,
                    home=ranking.home,
                    load_version=views.load_version,
                )
                return [question]
            case Snapshot():
                views.hear(event, now_s)
                if now_s >= self._sweep_due_s:
                    self._sweep_due_s = now_s + SWEEP_S
                    views.forget(now_s, FORGET_S)
            case LoadState():
                views.hear_load(event)
            case CallEnded():
                views.ended(event)
            case Placed():
                grant = event.granted.grant
                self._located(event.tenant, event.granted.session, grant.instance, grant.model)
            case RowSeen():
                row = event.row
                if row.state == "closed":
                    views.sessions.drop((row.tenant, row.id))
                elif row.instance is not None:
                    self._located(row.tenant, row.id, row.instance, row.model)
            case InstanceLost():
                views.lost(event.instance, event.boot_id)
            case _:
                assert_never(event)
        return []

    def rank(self, place: PlaceCall, now_s: float) -> Ranking:
        """Price the call on every instance that may take it, and find its home."""
        if self.views.models and place.model not in self.views.models:
            return Ranking(error=_unknown_model(place.model, self.views.models))
        matches = self.views.prefixes.match(place.links)
        home = self._home(place, matches, now_s)
        sizes = self._sizes(place, matches)
        priced: list[tuple[bool, Candidate]] = []
        for view in self.views.instances.values():
            model = view.models.get(place.model)
            if model is None or not self._is_candidate(view, place, now_s):
                continue
            load = self._load_without_own_lease(view, model, home)
            match = matches.get(view.instance, Match())
            candidate = _price(view, model, load, match, sizes, self._linger_s)
            priced.append((_fits(model, sizes), candidate))
        # Sizes are guesses from bytes: when none seems to fit, the exact check is the instance's.
        kept = [c for fits, c in priced if fits] or [c for _, c in priced]
        kept.sort(key=lambda c: (c.instance in place.ranked_last, c.cost.total_s, c.instance))
        if not kept and (home is None or not home.is_healthy):
            detail = f"no healthy instance serves {place.model} now"
            return Ranking(
                home=home, error=ErrorInfo(code="no_instance", detail=detail, retry_after_s=1.0)
            )
        return Ranking(candidates=tuple(kept), home=home)

    def overdue(self, now_s: float) -> list[InstanceLost]:
        """Instances whose heartbeat is late: ask whether they are still there."""
        return [
            InstanceLost(instance=view.instance, boot_id=view.snapshot.boot_id)
            for view in self.views.instances.values()
            if not view.is_gone and view.age_s(now_s) >= self._config.probe_after_s
        ]

    def _is_candidate(self, view: InstanceView, place: PlaceCall, now_s: float) -> bool:
        return (
            view.takes_work
            and view.age_s(now_s) < self._config.stale_s
            and view.instance not in place.excluded
        )

    def _sizes(self, place: PlaceCall, matches: dict[str, Match]) -> Sizes:
        longest = max(matches.values(), key=lambda m: (m.tokens, m.end_bytes), default=Match())
        rate = self.views.rates.rate(place.model, place.tenant, place.session)
        rest_bytes = max(0, place.prompt_bytes - longest.end_bytes)
        prompt = max(1, longest.tokens + math.ceil(rest_bytes * rate))
        output = self.views.rates.output(place.model, place.max_tokens)
        return Sizes(prompt, longest.tokens, output)

    def _home(self, place: PlaceCall, matches: dict[str, Match], now_s: float) -> Home | None:
        """The instance with the longest prefix; without any, the one that served the session."""
        at = self.views.sessions.get((place.tenant, place.session)) if place.session else None
        last = at.instance if at is not None and at.model == place.model else None
        longest = max((m.tokens for m in matches.values()), default=0)
        holders = sorted(i for i, m in matches.items() if m.tokens == longest)
        if last is not None and (not holders or last in holders):
            instance = last
        elif holders:
            instance = min(holders, key=lambda i: (matches[i].tier != "device", i))
        else:
            return None
        view = self.views.instances.get(instance)
        if view is None:
            return None
        age_s = view.age_s(now_s)
        return Home(
            instance=instance,
            tier=matches.get(instance, Match()).tier,
            is_healthy=view.takes_work
            and age_s < self._config.gone_s
            and instance not in place.excluded,
            snapshot_age_s=age_s,
        )

    def _load_without_own_lease(
        self, view: InstanceView, model: ModelState, home: Home | None
    ) -> InstanceLoad:
        """Admission's account, less the room that it keeps at home for this very return."""
        load = self.views.load(view.instance)
        if not load.leases or home is None or home.instance != view.instance:
            return load
        held_s = load.by_model_s.get(model.model, 0.0)
        own_s = min(self._lease_s, held_s, load.committed_s)
        return msgspec.structs.replace(
            load,
            committed_s=load.committed_s - own_s,
            by_model_s=load.by_model_s | {model.model: held_s - own_s},
        )

    def _located(self, tenant: str, session: str, instance: str, model: str) -> None:
        self.views.sessions.put((tenant, session), SessionPlace(instance, model))


def _price(
    view: InstanceView,
    model: ModelState,
    load: InstanceLoad,
    match: Match,
    sizes: Sizes,
    linger_s: float,
) -> Candidate:
    """The call's cost on one instance, and what it would be charged there."""
    prefill_s = model.prefill_fixed_s + model.prefill_token_s * sizes.new
    decode_s = model.decode_step_s * sizes.output / (1 + model.calls_running)
    recompute_s = model.prefill_token_s * max(0, sizes.known - match.tokens)
    kv_s = recompute_s + model.restore_token_s * match.restored_tokens
    queue_s = _queue_s(view, model, load, prefill_s + kv_s, linger_s)
    risk_s = model.deadline_risk * model.decode_step_s
    cost = CostTerms(
        load_s=queue_s + prefill_s + decode_s + risk_s,
        kv_s=kv_s,
        activate_s=0.0 if model.residency == "active" else model.switch_s,
    )
    return Candidate(
        instance=view.instance,
        boot_id=view.snapshot.boot_id,
        cost=cost,
        charge_s=prefill_s + kv_s + decode_s,
        charge_blocks=_blocks(model, sizes),
        prefix_tier=match.tier,
        prefix_tokens=match.tokens,
    )


def _queue_s(
    view: InstanceView, model: ModelState, load: InstanceLoad, own_s: float, linger_s: float
) -> float:
    """Seconds until the call's prefill starts: other slots, work ahead, rounds it must sit out."""
    ahead_s = model.remaining_s + load.by_model_s.get(model.model, 0.0)
    elsewhere_s = max(0.0, load.committed_s - load.by_model_s.get(model.model, 0.0))
    is_idle = not any(other.calls_waiting or other.calls_running for other in view.snapshot.models)
    # An open slot without work is not kept to its planned end.
    slot_wait_s = min(model.next_slot_s, linger_s) if is_idle else model.next_slot_s
    wait_s = slot_wait_s + ahead_s + elsewhere_s
    busy = sum(
        1
        for other in view.snapshot.models
        if other.model == model.model or other.calls_waiting or other.calls_running
    )
    round_s, slot = view.snapshot.round_s, view.snapshot.slot
    if busy > 1 and round_s > 0:
        slot_s = round_s / busy
        room_s = slot.remaining_s if slot is not None and slot.model == model.model else slot_s
        over_s = ahead_s + own_s - room_s
        if over_s > 0:
            wait_s += math.ceil(over_s / slot_s) * (round_s - slot_s)
    return wait_s


def _blocks(model: ModelState, sizes: Sizes) -> int:
    if not model.block_tokens:
        return 0
    tokens = sizes.prompt + sizes.output
    if model.max_model_len:
        tokens = min(tokens, model.max_model_len)
    return math.ceil(tokens / model.block_tokens)


def _fits(model: ModelState, sizes: Sizes) -> bool:
    """The call's own blocks fit the largest pool that the model can have there."""
    return not model.blocks_max or _blocks(model, sizes) <= model.blocks_max


def _unknown_model(model: str, known: set[str]) -> ErrorInfo:
    listed = ", ".join(sorted(known)[:20])
    detail = f"no model {model!r}; served here: {listed}"
    return ErrorInfo(code="unknown_model", detail=detail, param="model")
