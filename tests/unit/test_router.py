"""The router's prices and candidates."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_common.policies import policy_set
from talaria_common.wire import (
    AdmitCall,
    CallEnded,
    CallKey,
    EndReason,
    Grant,
    Granted,
    HeldPrefix,
    InstanceLoad,
    Link,
    LoadState,
    ModelState,
    NotGranted,
    PlaceCall,
    PlaceReason,
    SessionRow,
    SlotState,
    Snapshot,
    Usage,
)
from talaria_router.config import RouterConfig
from talaria_router.policy import InstanceLost, Placed, Ranking, Router, RowSeen
from talaria_router.state import Match, Prefixes

MODEL = "m"
LINKS = (
    Link(b"sys", 1000),
    Link(b"u1", 2000),
    Link(b"r1", 2400, True),
    Link(b"u2", 3000),
)


def a_model(model: str = MODEL, **more: Any) -> ModelState:
    fields: dict[str, Any] = {
        "residency": "active",
        "prefill_fixed_s": 0.1,
        "prefill_token_s": 0.01,
        "decode_step_s": 0.02,
        "restore_token_s": 0.001,
        "block_tokens": 16,
        "blocks_max": 1000,
        "max_model_len": 4096,
        "switch_s": 2.0,
    }
    return ModelState(model=model, **(fields | more))


def a_snapshot(instance: str, *models: ModelState, version: int = 1, **more: Any) -> Snapshot:
    fields: dict[str, Any] = {"boot_id": "b1", "models": models or (a_model(),)}
    return Snapshot(instance=instance, version=version, **(fields | more))


def a_place(**more: Any) -> PlaceCall:
    fields: dict[str, Any] = {
        "key": CallKey("c1"),
        "model": MODEL,
        "links": LINKS,
        "prompt_bytes": 3000,
        "max_tokens": 100,
    }
    return PlaceCall(**(fields | more))


def a_router(*snapshots: Snapshot, policy: str = "talaria", **config: Any) -> Router:
    router = Router(RouterConfig(**({"tokens_per_byte": 0.25} | config)), policy_set(policy))
    for snapshot in snapshots or (a_snapshot("i-1"), a_snapshot("i-2")):
        router.step(snapshot, 0.0)
    return router


def order(ranking: Ranking) -> list[str]:
    return [candidate.instance for candidate in ranking.candidates]


def a_load(instance: str, committed_s: float, version: int = 1, **more: Any) -> LoadState:
    by_model_s = {MODEL: committed_s}
    load = InstanceLoad(instance=instance, committed_s=committed_s, by_model_s=by_model_s, **more)
    return LoadState(epoch=1, version=version, instances=(load,))


def an_end(instance: str, **more: Any) -> CallEnded:
    grant = Grant(
        epoch=1, n=1, key=CallKey("c0"), instance=instance, boot_id="b1", model=MODEL, charge_s=1
    )
    fields: dict[str, Any] = {
        "grant": grant,
        "session": "s",
        "call_index": 0,
        "tail": LINKS[1],
        "reason": EndReason.FINISHED,
        "usage": Usage(prompt_tokens=1000, completion_tokens=50),
        "prefix_tier": "device",
    }
    return CallEnded(**(fields | more))


# --- cost ---


def test_equal_costs_go_to_the_lower_id() -> None:
    assert order(a_router().rank(a_place(), 0.0)) == ["i-1", "i-2"]


def test_the_cost_of_a_fresh_call_is_prefill_and_decode() -> None:
    (best, _) = a_router().rank(a_place(), 0.0).candidates
    prefill_s, decode_s = 0.1 + 0.01 * 750, 0.02 * 100
    assert best.cost.load_s == pytest.approx(prefill_s + decode_s)
    assert (best.cost.kv_s, best.cost.activate_s) == (0, 0)
    assert best.charge_s == pytest.approx(prefill_s + decode_s)
    assert best.charge_blocks == 54  # 850 tokens in blocks of 16


def test_continuation_prefers_the_instance_holding_its_prefix() -> None:
    held = (HeldPrefix(b"u1", 500, "device"),)
    router = a_router(a_snapshot("i-1"), a_snapshot("i-2", prefixes=held))
    ranking = router.rank(a_place(), 0.0)
    assert order(ranking) == ["i-2", "i-1"]
    home, other = ranking.candidates
    assert (home.cost.kv_s, home.prefix_tier, home.prefix_tokens) == (0, "device", 500)
    assert other.cost.kv_s == pytest.approx(0.01 * 500)  # recompute
    assert home.cost.load_s == pytest.approx(other.cost.load_s)  # the new part is the same


def test_a_prefix_on_the_host_costs_its_restore() -> None:
    held = (HeldPrefix(b"u1", 500, "host"),)
    router = a_router(a_snapshot("i-1"), a_snapshot("i-2", prefixes=held))
    best = router.rank(a_place(), 0.0).candidates[0]
    assert (best.instance, best.prefix_tier) == ("i-2", "host")
    assert best.cost.kv_s == pytest.approx(0.001 * 500)


def test_only_the_part_beyond_the_device_is_restored() -> None:
    held = (HeldPrefix(b"sys", 250, "device"), HeldPrefix(b"u1", 500, "host"))
    router = a_router(a_snapshot("i-1", prefixes=held))
    assert router.rank(a_place(), 0.0).candidates[0].cost.kv_s == pytest.approx(0.001 * 250)


def test_a_prefix_that_cannot_be_restored_is_recomputed() -> None:
    held = (HeldPrefix(b"u1", 500, "remote"),)
    router = a_router(a_snapshot("i-1", prefixes=held))
    assert router.rank(a_place(), 0.0).candidates[0].prefix_tokens == 0


def test_a_model_that_is_not_active_costs_its_switch() -> None:
    resident = a_model(residency="host", switch_s=2.0)
    router = a_router(a_snapshot("i-1", resident), a_snapshot("i-2"))
    ranking = router.rank(a_place(), 0.0)
    assert order(ranking) == ["i-2", "i-1"]
    assert ranking.candidates[1].cost.activate_s == 2.0


def test_work_ahead_and_the_wait_for_the_slot_are_priced() -> None:
    waits = a_model(next_slot_s=3.0, remaining_s=1.5, calls_waiting=1)
    router = a_router(a_snapshot("i-1", waits), a_snapshot("i-2"))
    near, far = router.rank(a_place(), 0.0).candidates
    assert far.cost.load_s - near.cost.load_s == pytest.approx(4.5)


def test_an_open_slot_without_work_is_waited_for_no_longer_than_it_lingers() -> None:
    idle = a_model(next_slot_s=8.0, residency="host", switch_s=0.0)
    router = a_router(a_snapshot("i-1", idle), a_snapshot("i-2"), policy="talaria+linger_s=0.6")
    near, far = router.rank(a_place(), 0.0).candidates
    assert far.cost.load_s - near.cost.load_s == pytest.approx(0.6)


def test_a_call_that_does_not_fit_the_slot_pays_whole_rounds() -> None:
    def a_busy(slot_left_s: float) -> Snapshot:
        mine = a_model(calls_running=1)
        other = a_model("other", residency="host", calls_waiting=1)
        slot = SlotState(model=MODEL, phase="D", remaining_s=slot_left_s)
        return a_snapshot("i-1", mine, other, slot=slot, round_s=20.0)

    (roomy,) = a_router(a_busy(9.0)).rank(a_place(), 0.0).candidates
    (tight,) = a_router(a_busy(1.0)).rank(a_place(), 0.0).candidates
    assert tight.cost.load_s - roomy.cost.load_s == pytest.approx(10.0)


def test_grants_since_the_snapshot_are_priced_so_that_a_burst_spreads() -> None:
    router = a_router()
    router.step(a_load("i-1", 2.0), 0.0)
    assert order(router.rank(a_place(), 0.0)) == ["i-2", "i-1"]


def test_an_older_account_is_dropped() -> None:
    router = a_router()
    router.step(a_load("i-1", 0.0, version=5), 0.0)
    router.step(a_load("i-1", 2.0, version=4), 0.0)
    assert order(router.rank(a_place(), 0.0)) == ["i-1", "i-2"]


def test_the_room_kept_for_a_return_does_not_count_against_it() -> None:
    router = a_router()
    row = SessionRow(id="s", tenant="", source="header", model=MODEL, instance="i-1")
    router.step(RowSeen(row=row), 0.0)
    router.step(a_load("i-1", 0.5, leases=1), 0.0)
    assert order(router.rank(a_place(session="s", links=()), 0.0))[0] == "i-1"
    assert order(router.rank(a_place(session="t", links=()), 0.0))[0] == "i-2"


def test_missed_deadlines_raise_the_price() -> None:
    router = a_router(a_snapshot("i-1", a_model(deadline_risk=10)), a_snapshot("i-2"))
    assert order(router.rank(a_place(), 0.0)) == ["i-2", "i-1"]


# --- sizes ---


def test_tokens_per_byte_are_learned_from_usage() -> None:
    router = a_router()
    router.step(an_end("i-9"), 0.0)  # 1000 tokens in 2000 bytes
    (best, _) = router.rank(a_place(links=()), 0.0).candidates
    assert best.charge_blocks == 100  # (1500 + 100) / 16


def test_a_sessions_own_rate_is_preferred() -> None:
    router = a_router()
    router.step(an_end("i-9"), 0.0)
    usage = Usage(prompt_tokens=200, completion_tokens=100)
    router.step(an_end("i-9", session="t", usage=usage), 0.0)
    blocks = [
        router.rank(a_place(links=(), session=s), 0.0).candidates[0].charge_blocks
        for s in ("s", "t")
    ]
    assert blocks == [100, 25]


def test_the_expected_output_is_learned_and_bounded_by_the_callers_limit() -> None:
    router = a_router()
    for _ in range(50):
        router.step(an_end("i-9", usage=Usage(prompt_tokens=1000, completion_tokens=40)), 0.0)
    blocks = [
        router.rank(a_place(links=(), max_tokens=limit), 0.0).candidates[0].charge_blocks
        for limit in (4000, 1)
    ]
    assert blocks == [97, 94]  # (1500 + 40) / 16, (1500 + 1) / 16


def test_a_known_prefix_tells_its_tokens_exactly() -> None:
    held = (HeldPrefix(b"r1", 800, "device"),)
    router = a_router(a_snapshot("i-1", prefixes=held))
    (best,) = router.rank(a_place(), 0.0).candidates
    assert best.charge_s == pytest.approx(0.1 + 0.01 * 150 + 0.02 * 100)  # 600 bytes are new


# --- candidates ---

NOT_RANKED: dict[str, dict[str, Any]] = {
    "not ready": {"is_ready": False},
    "draining": {"is_draining": True},
    "another model only": {"models": (a_model("other"),)},
    "its pool is too small": {"models": (a_model(blocks_max=10),)},
}


@pytest.mark.parametrize("state", NOT_RANKED.values(), ids=NOT_RANKED.keys())
def test_an_instance_that_cannot_take_the_call_is_not_ranked(state: dict[str, Any]) -> None:
    router = a_router(a_snapshot("i-1", **state), a_snapshot("i-2"))
    assert order(router.rank(a_place(), 0.0)) == ["i-2"]


def test_when_no_pool_seems_large_enough_the_instance_decides() -> None:
    router = a_router(a_snapshot("i-1", a_model(blocks_max=10)))
    assert order(router.rank(a_place(), 0.0)) == ["i-1"]


def test_a_stale_snapshot_is_not_ranked_but_may_be_home() -> None:
    held = (HeldPrefix(b"u1", 500, "device"),)
    router = a_router(a_snapshot("i-1", prefixes=held))
    ranking = router.rank(a_place(), 2.0)
    assert (order(ranking), ranking.error) == ([], None)
    assert ranking.home is not None
    assert ranking.home.is_healthy


def test_an_instance_silent_for_five_seconds_is_no_home() -> None:
    held = (HeldPrefix(b"u1", 500, "device"),)
    router = a_router(a_snapshot("i-1", prefixes=held))
    ranking = router.rank(a_place(), 5.0)
    assert ranking.error is not None
    assert ranking.error.code == "no_instance"


def test_an_instance_without_responders_is_gone_until_it_speaks_again() -> None:
    router = a_router()
    assert router.overdue(0.5) == []
    lost = InstanceLost(instance="i-1", boot_id="b1")
    assert lost in router.overdue(0.8)
    router.step(lost, 0.8)
    assert order(router.rank(a_place(), 0.8)) == ["i-2"]
    router.step(a_snapshot("i-1", version=2), 0.9)
    assert order(router.rank(a_place(), 0.9)) == ["i-1", "i-2"]


def test_an_excluded_instance_is_never_ranked() -> None:
    assert order(a_router().rank(a_place(excluded=("i-1",)), 0.0)) == ["i-2"]


def test_an_instance_ranked_last_comes_behind_dearer_ones() -> None:
    router = a_router(a_snapshot("i-1"), a_snapshot("i-2", a_model(remaining_s=50)))
    assert order(router.rank(a_place(ranked_last=("i-1",)), 0.0)) == ["i-2", "i-1"]


def test_a_model_that_no_instance_ever_listed_is_unknown() -> None:
    (answer,) = a_router().step(a_place(model="other"), 0.0)
    assert isinstance(answer, NotGranted)
    assert (answer.error.code, answer.error.param) == ("unknown_model", "model")
    assert MODEL in answer.error.detail


def test_before_any_instance_is_heard_no_model_is_called_unknown() -> None:
    router = Router(RouterConfig(), policy_set("talaria"))
    (answer,) = router.step(a_place(), 0.0)
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "no_instance"


def test_a_model_whose_instances_are_gone_is_not_unknown() -> None:
    router = a_router(a_snapshot("i-1"), a_snapshot("i-2", a_model("other")))
    router.step(a_snapshot("i-2", a_model("other"), version=2), 100.0)
    ranking = router.rank(a_place(), 100.0)
    assert ranking.error is not None
    assert ranking.error.code == "no_instance"


def test_snapshots_out_of_order_and_of_a_dead_boot_are_ignored() -> None:
    router = a_router(a_snapshot("i-1", version=5))
    router.step(a_snapshot("i-1", version=4, is_draining=True), 0.0)
    assert order(router.rank(a_place(), 0.0)) == ["i-1"]
    router.step(a_snapshot("i-1", version=1, boot_id="b2"), 0.0)
    router.step(a_snapshot("i-1", version=9, boot_id="b1"), 0.0)
    assert router.rank(a_place(), 0.0).candidates[0].boot_id == "b2"


# --- home ---


def test_home_is_where_the_longest_prefix_is() -> None:
    router = a_router(
        a_snapshot("i-1", prefixes=(HeldPrefix(b"sys", 250, "device"),)),
        a_snapshot("i-2", prefixes=(HeldPrefix(b"u1", 500, "host"),)),
    )
    (question,) = router.step(a_place(), 0.0)
    assert isinstance(question, AdmitCall)
    assert question.home is not None
    assert (question.home.instance, question.home.tier) == ("i-2", "host")


def test_without_a_known_prefix_home_is_where_the_session_ran_last() -> None:
    router = a_router()
    grant = an_end("i-2").grant
    granted = Granted(
        grant=grant, session="s", source="header", call_index=0, reason=PlaceReason.RANKED
    )
    router.step(Placed(tenant="", granted=granted), 0.0)
    home = router.rank(a_place(session="s"), 0.0).home
    assert home is not None
    assert (home.instance, home.tier) == ("i-2", "absent")


def test_a_call_that_has_just_ended_is_a_prefix_before_the_next_snapshot() -> None:
    router = a_router()
    router.step(an_end("i-2", reply=b"r1"), 0.0)
    best = router.rank(a_place(), 0.0).candidates[0]
    assert (best.instance, best.prefix_tokens) == ("i-2", 1050)


def test_a_closed_session_has_no_home() -> None:
    router = a_router()
    row = SessionRow(id="s", tenant="", source="header", model=MODEL, instance="i-1")
    router.step(RowSeen(row=row), 0.0)
    closed = SessionRow(id="s", tenant="", source="header", state="closed", instance="i-1")
    router.step(RowSeen(row=closed), 0.0)
    assert router.rank(a_place(session="s", links=()), 0.0).home is None


# --- the prefix index ---


def test_what_an_instance_no_longer_lists_is_forgotten() -> None:
    prefixes = Prefixes()
    prefixes.replace("i-1", [HeldPrefix(b"sys", 250, "device"), HeldPrefix(b"u1", 500, "host")])
    prefixes.replace("i-2", [HeldPrefix(b"sys", 250, "host")])
    prefixes.replace("i-1", [HeldPrefix(b"sys", 250, "host")])
    prefixes.check()
    assert prefixes.match(LINKS) == {
        instance: Match(tokens=250, tier="host", device_tokens=0, end_bytes=1000)
        for instance in ("i-1", "i-2")
    }
