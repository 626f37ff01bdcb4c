"""Admission's decisions: grants, leases, the account, cancels, restarts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from talaria_admission.config import AdmissionConfig
from talaria_admission.events import (
    CancelAnswered,
    Closing,
    LeaseOver,
    Loaded,
    Opened,
    RowChanged,
    SendCancel,
    SessionOver,
    SessionStarted,
    Tick,
    ToolGap,
    WakeAt,
)
from talaria_admission.policy import Admission
from talaria_common.policies import policy_set
from talaria_common.wire import (
    CallKey,
    CancelCall,
    EndReason,
    EndSession,
    HeldPrefix,
    Home,
    LiveGrant,
    LoadState,
    NotGranted,
    PlaceReason,
    SessionRow,
    Snapshot,
)
from tests.unit.admission_worlds import MODEL, World, a_snapshot, an_end, chain

T = TypeVar("T")


def only(effects: Iterable[Any], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def refusal(answer: object) -> str:
    assert isinstance(answer, NotGranted)
    return answer.error.code


def a_leased_session(world: World, instance: str = "i-1") -> None:
    """A session `s` whose first call has just ended on `instance`."""
    world.end(world.grant("c1", "u1", session="s", ranked=(instance,)), "u1")


RETURN = ("u1", "a:r1", "u2")


# --- leases ---


def test_a_lease_is_consumed_at_most_once() -> None:
    world = World()
    a_leased_session(world)
    world.now_s = 0.4
    first = world.grant("c2", *RETURN, session="s")
    second = world.grant("c3", *RETURN, session="s")
    assert [first.reason, second.reason] == [PlaceReason.LEASE, PlaceReason.RANKED]


def test_a_lease_names_the_grant_that_installed_it() -> None:
    world = World()
    before = world.grant("c1", "u1", session="s")
    world.end(before, "u1")
    assert world.grant("c2", *RETURN, session="s").grant.lease_of == before.grant.n


def test_a_lease_wins_over_the_ranking() -> None:
    world = World()
    a_leased_session(world, "i-2")
    granted = world.grant("c2", *RETURN, session="s", ranked=("i-1", "i-2"))
    assert (granted.grant.instance, granted.reason) == ("i-2", PlaceReason.LEASE)
    assert granted.runner_up == "i-1"


def test_a_lease_expires_tau_after_the_end_was_heard() -> None:
    world = World()
    a_leased_session(world)
    world.now_s = 1.0
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED


def test_an_end_heard_late_leaves_only_the_rest_of_tau() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    end = an_end(granted, chain("u1")[-1], age_s=0.7)
    world.beat(ended=(end,))
    world.now_s = 0.35
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED


LOST_LEASES: dict[str, dict[str, Any]] = {
    "the instance is excluded": {"excluded": ("i-1",)},
    "the instance is ranked last": {"ranked_last": ("i-1",)},
    "the router knows it is ill": {
        "home": Home(instance="i-1", tier="device", is_healthy=False, snapshot_age_s=0)
    },
}


@pytest.mark.parametrize("case", LOST_LEASES.values(), ids=LOST_LEASES.keys())
def test_a_lease_that_fails_a_check_is_dropped_for_good(case: dict[str, Any]) -> None:
    world = World()
    a_leased_session(world)
    granted = world.grant("c2", *RETURN, session="s", ranked=("i-2",), **case)
    assert (granted.reason, granted.grant.instance) == (PlaceReason.RANKED, "i-2")
    assert [e.outcome for e in only(world.effects, LeaseOver)] == ["voided"]
    assert world.grant("c3", *RETURN, session="s").reason is PlaceReason.RANKED


def test_a_lease_needs_its_prefix_on_device_or_host_by_the_latest_snapshot() -> None:
    world = World()
    tail = chain("u1")[-1].digest
    a_leased_session(world)
    world.beat(prefixes=(HeldPrefix(tail, 10, "host"),))
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.LEASE
    world.end(world.grant("c3", "v1", session="t"), "v1")
    world.now_s = 0.1
    world.beat(prefixes=())
    assert world.grant("c4", "v1", "a:x", "v2", session="t").reason is PlaceReason.RANKED


def test_a_call_whose_prefix_is_nowhere_leaves_no_lease() -> None:
    world = World()
    world.end(world.grant("c1", "u1", session="s"), "u1", prefix_tier="absent")
    assert world.committed_s() == 0


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.FAILED])
def test_only_a_finished_call_leaves_a_lease(reason: EndReason) -> None:
    world = World()
    world.end(world.grant("c1", "u1", session="s"), "u1", reason=reason)
    assert world.committed_s() == 0


def test_a_final_call_leaves_no_lease() -> None:
    world = World()
    world.end(world.grant("c1", "u1", session="s", is_final=True), "u1")
    assert world.committed_s() == 0


def test_a_policy_without_leases_installs_none() -> None:
    world = World(policy=policy_set("round-only"))
    a_leased_session(world)
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED


def test_a_repeated_end_installs_no_second_lease() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    for _ in range(2):
        world.end(granted, "u1")
    assert world.committed_s() == pytest.approx(0.5)
    world.grant("c2", *RETURN, session="s")
    world.end(granted, "u1")
    assert world.grant("c3", *RETURN, session="s").reason is PlaceReason.RANKED


def test_an_end_of_an_overtaken_attempt_installs_no_lease() -> None:
    world = World()
    first = world.grant("c1", "u1", session="s")
    world.grant("c1", "u1", session="s", attempt=2, ranked=("i-2",))
    world.end(first, "u1")
    assert world.committed_s("i-1") == 0


def test_parallel_calls_have_leases_of_their_own() -> None:
    world = World()
    both = [(text, world.grant(f"c-{text}", text, session="s")) for text in ("u1", "v1")]
    for text, granted in both:
        world.end(granted, text)
    reasons = [
        world.grant(f"r-{text}", text, "a:x", "more", session="s").reason for text, _ in both
    ]
    assert reasons == [PlaceReason.LEASE, PlaceReason.LEASE]


def test_an_agent_that_rewrote_its_history_returns_home_unless_it_has_calls_in_flight() -> None:
    world = World()
    a_leased_session(world, "i-2")
    assert world.grant("c2", "rewritten", session="s").reason is PlaceReason.LEASE
    world.end(world.grant("c3", "v1", session="s", ranked=("i-2",)), "v1")
    beside = world.grant("c4", "another", session="s")  # c2 is still open
    assert beside.reason is PlaceReason.RANKED


def test_a_return_that_overtakes_the_end_is_taken_home_and_makes_no_second_lease() -> None:
    world = World()
    first = world.grant("c1", "u1", session="s", ranked=("i-2",))
    back = world.grant("c2", *RETURN, session="s", ranked=("i-1", "i-2"))
    assert (back.reason, back.grant.instance) == (PlaceReason.LEASE_IMPLIED, "i-2")
    assert back.grant.lease_of == first.grant.n
    world.end(first, "u1")
    assert world.grant("c3", *RETURN, session="s").reason is PlaceReason.RANKED


def test_a_return_goes_on_from_the_latest_call_that_it_extends() -> None:
    before = World()
    first = before.grant("c1", "u1", session="s", ranked=("i-1",))
    second = before.grant("c2", *RETURN, session="s")
    live = tuple(
        LiveGrant(grant=g.grant, session="s", call_index=n, tail=tail)
        for n, (g, tail) in enumerate([(first, chain("u1")[-1]), (second, chain(*RETURN)[-1])])
    )
    snapshot = Snapshot(instance="i-1", boot_id="b1", version=1, live_grants=live)
    world = a_successor(snapshot, a_snapshot("i-2"))
    back = world.grant("c3", *RETURN, "a:r2", "u3", session="s")
    assert back.grant.lease_of == second.grant.n
    again = world.grant("c4", "u1", "a:other", "v2", session="s")
    assert again.grant.lease_of is None  # that of c1 was consumed by c2


def test_a_cancelled_call_implies_no_lease() -> None:
    world = World()
    world.grant("c1", "u1", session="s")
    world.step(CancelCall(call_id="c1"))
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED


def test_a_new_boot_voids_the_leases_of_the_old_one() -> None:
    world = World()
    a_leased_session(world)
    world.beat(boot_id="b2")
    assert [e.outcome for e in only(world.effects, LeaseOver)] == ["voided"]
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED


def test_the_end_of_a_session_takes_its_leases() -> None:
    world = World()
    a_leased_session(world)
    world.step(EndSession(session="s"))
    assert world.committed_s() == 0


# --- candidates and overload ---


def test_the_first_candidate_that_accepts_gets_the_call() -> None:
    world = World()
    world.beat("i-1", queued_s=61.0)
    granted = world.grant("c1", "u1")
    assert (granted.grant.instance, granted.reason) == ("i-2", PlaceReason.RANKED)


def test_beyond_the_cap_new_sessions_wait_outside_and_continuations_do_not() -> None:
    world = World()
    a_leased_session(world)
    world.pass_s(2)
    for instance in world.instances:
        world.beat(instance, queued_s=90.0)
    assert refusal(world.admit("new", "n1")) == "overloaded"
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.RANKED
    for instance in world.instances:
        world.beat(instance, queued_s=130.0)
    answer = world.admit("c3", *RETURN, session="s")
    assert isinstance(answer, NotGranted)
    assert answer.error.retry_after_s == pytest.approx(130 - 2 * 60, abs=1)


def test_retry_after_is_what_the_wait_exceeds_the_cap_by() -> None:
    world = World()
    for instance in world.instances:
        world.beat(instance, queued_s=75.0)
    answer = world.admit("c1", "u1")
    assert isinstance(answer, NotGranted)
    assert answer.error.retry_after_s == pytest.approx(15.0)


def test_running_decode_is_no_wait_since_a_new_call_joins_it() -> None:
    world = World()
    for instance in world.instances:
        world.beat(instance, remaining_s=500.0)
    assert world.grant("c1", "u1").reason is PlaceReason.RANKED


CAPS: dict[str, tuple[AdmissionConfig, dict[str, int]]] = {
    "calls": (AdmissionConfig(queued_calls_max=3), {"queued_calls": 3}),
    "bytes": (AdmissionConfig(queued_bytes_max=1000), {"queued_body_bytes": 990}),
}


@pytest.mark.parametrize("case", CAPS.values(), ids=CAPS.keys())
def test_a_full_queue_turns_a_new_session_away(
    case: tuple[AdmissionConfig, dict[str, int]],
) -> None:
    config, full = case
    world = World(config=config)
    for instance in world.instances:
        world.beat(instance, **full)
    assert refusal(world.admit("c1", "u1", prompt_bytes=20)) == "overloaded"


def test_grants_since_the_snapshot_count_as_queued() -> None:
    world = World(config=AdmissionConfig(queued_calls_max=2), instances=("i-1",))
    for n in range(2):
        world.grant(f"c{n}", f"u{n}", ranked=("i-1",))
    assert refusal(world.admit("c9", "u9", ranked=("i-1",))) == "overloaded"


def test_calls_priced_with_the_same_account_are_spread() -> None:
    world = World()
    world.grant("c", "u", ranked=("i-2",))
    (load,) = only(world.effects, LoadState)
    spread = [world.grant(f"c{n}", f"u{n}", load_version=load.version) for n in range(6)]
    assert [g.grant.instance for g in spread] == ["i-1", "i-2"] * 3


def test_what_the_router_has_counted_is_not_counted_twice() -> None:
    world = World()
    world.pass_s(2)
    world.grant("c1", "u1", ranked=("i-1",))
    (load,) = only(world.effects, LoadState)
    assert world.grant("c2", "u2", load_version=load.version).grant.instance == "i-1"


NOT_CANDIDATES: dict[str, dict[str, Any]] = {
    "not ready": {"is_ready": False},
    "draining": {"is_draining": True},
}


@pytest.mark.parametrize("state", NOT_CANDIDATES.values(), ids=NOT_CANDIDATES.keys())
def test_an_instance_that_takes_no_work_is_skipped(state: dict[str, bool]) -> None:
    world = World()
    world.beat("i-1", **state)
    assert world.grant("c1", "u1").grant.instance == "i-2"


def test_nothing_new_is_placed_on_a_stale_snapshot_but_a_return_is() -> None:
    world = World(policy=policy_set("talaria+lease_tau_s=4"))
    a_leased_session(world, "i-1")
    for _ in range(4):
        world.now_s += 0.5
        world.beat("i-2")
    assert world.grant("new", "n1").grant.instance == "i-2"
    assert world.grant("c2", *RETURN, session="s").grant.instance == "i-1"


def test_an_instance_that_nobody_heard_of_gets_nothing() -> None:
    world = World()
    assert refusal(world.admit("c1", "u1", ranked=("i-9",))) == "no_instance"


def test_a_grant_names_the_boot_that_admission_heard_last() -> None:
    world = World()
    world.beat("i-1", boot_id="b2")
    assert world.grant("c1", "u1", ranked=("i-1",)).grant.boot_id == "b2"


# --- one grant per call ---


def test_a_known_attempt_gets_its_earlier_answer() -> None:
    world = World()
    first = world.grant("c1", "u1")
    again = world.grant("c1", "u1", ranked=("i-2",))
    assert again.grant == first.grant
    assert again.reason is PlaceReason.REPEATED


def test_a_refused_attempt_stays_refused() -> None:
    world = World()
    for instance in world.instances:
        world.beat(instance, queued_s=75.0)
    assert refusal(world.admit("c1", "u1")) == "overloaded"
    for instance in world.instances:
        world.beat(instance, queued_s=0.0)
    assert refusal(world.admit("c1", "u1")) == "overloaded"
    assert world.grant("c1", "u1", attempt=2).call_index == 0


def test_a_later_attempt_ends_the_earlier_and_keeps_session_and_index() -> None:
    world = World()
    first = world.grant("c1", "u1")
    second = world.grant("c1", "u1", attempt=2, ranked=("i-2",), excluded=("i-1",))
    assert (second.session, second.call_index) == (first.session, first.call_index)
    assert (world.committed_s("i-1"), world.committed_s("i-2")) == (0, 0.5)


def test_a_late_attempt_is_superseded() -> None:
    world = World()
    world.grant("c1", "u1", attempt=2)
    assert refusal(world.admit("c1", "u1", attempt=1)) == "superseded"


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_call_that_is_over_is_not_placed_again(attempt: int) -> None:
    world = World()
    first = world.grant("c1", "u1")
    world.end(first, "u1")
    world.settle(first, 0, 1)
    assert refusal(world.admit("c1", "u1", attempt=attempt)) == "superseded"


def test_a_cancelled_call_is_not_placed_for_a_minute() -> None:
    world = World()
    world.step(CancelCall(call_id="c1"))
    assert refusal(world.admit("c1", "u1")) == "cancelled"
    world.pass_s(61)
    assert world.grant("c1", "u1").call_index == 0


# --- the account ---


def test_a_charge_moves_to_the_snapshot_once_that_lists_it() -> None:
    world = World()
    granted = world.grant("c1", "u1")
    assert world.committed_s() == pytest.approx(0.5)
    world.beat(live=(granted.grant,))
    assert world.committed_s() == 0


def test_a_lost_end_is_found_in_the_snapshots_list() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.beat(live=(granted.grant,))
    world.beat(ended=(an_end(granted, chain("u1")[-1]),))
    assert world.admission.row("", "s").in_flight == 0
    assert world.grant("c2", *RETURN, session="s").reason is PlaceReason.LEASE


def test_a_grant_in_no_list_is_void_after_accept_timeout_and_a_second() -> None:
    world = World()
    world.grant("c1", "u1")
    world.pass_s(1.5)
    assert world.committed_s() == pytest.approx(0.5)
    world.pass_s(0.5)
    assert world.committed_s() == 0


def test_a_large_body_gets_the_longer_timeout() -> None:
    world = World()
    world.grant("c1", "u1", prompt_bytes=2**21)
    world.pass_s(3.5)
    assert world.committed_s() == pytest.approx(0.5)
    world.pass_s(0.5)
    assert world.committed_s() == 0


def test_a_live_entry_overrides_void() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.pass_s(3)
    assert world.admission.row("", "s").in_flight == 0
    world.beat(live=(granted.grant,))
    assert world.admission.row("", "s").in_flight == 1


def test_a_grant_asked_for_again_lives_for_another_timeout() -> None:
    world = World()
    world.grant("c1", "u1")
    world.pass_s(3)
    world.grant("c1", "u1")
    assert world.committed_s() == pytest.approx(0.5)
    world.pass_s(2)
    assert world.committed_s() == 0


def test_a_silent_instance_loses_its_grants_and_keeps_its_leases() -> None:
    world = World(policy=policy_set("talaria+lease_tau_s=60"))
    a_leased_session(world)
    granted = world.grant("c2", "n1", session="t", ranked=("i-1",))
    world.beat(live=(granted.grant,))
    world.now_s = 5.5
    world.step(Tick())
    assert world.admission.row("", "t").in_flight == 0
    world.beat(prefixes=(HeldPrefix(chain("u1")[-1].digest, 10, "host"),))
    assert world.grant("c3", *RETURN, session="s").reason is PlaceReason.LEASE


def test_a_new_boot_ends_what_the_old_one_held() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s", ranked=("i-1",))
    world.beat(live=(granted.grant,))
    world.beat(boot_id="b2")
    assert world.admission.row("", "s").in_flight == 0
    world.beat(boot_id="b1", live=(granted.grant,))  # a late message of the dead boot
    assert world.admission.row("", "s").in_flight == 0


def published_in(world: World, grants: int, every_s: float) -> int:
    count = 0
    for n in range(grants):
        world.now_s += every_s
        world.grant(f"c{world.now_s}-{n}", f"u{n}")
        count += len(only(world.effects, LoadState))
    return count


def test_the_account_is_published_at_once_in_a_burst_and_twenty_times_a_second_under_load() -> None:
    world = World()
    world.pass_s(2)
    assert published_in(world, 8, 0.001) >= 7  # a heartbeat may have used one
    assert published_in(world, 100, 0.005) == pytest.approx(10, abs=1)


def test_a_change_held_back_is_published_at_the_next_wake() -> None:
    world = World()
    published_in(world, 20, 0.001)
    (wake,) = only(world.step(Tick()), WakeAt)
    world.now_s = wake.at_s
    (load,) = only(world.step(Tick()), LoadState)
    assert load.instances[0].grants == 20


def test_at_rest_the_account_is_exactly_zero() -> None:
    world = World()
    for n in range(50):
        granted = world.grant(f"c{n}", f"u{n}", session=f"s{n % 7}")
        if n % 3:
            world.end(granted, f"u{n}")
    world.pass_s(10)
    loads = world.admission.books.account.load(1, 1, world.now_s).instances
    assert [(i.committed_s, i.committed_blocks, i.leases, i.grants) for i in loads] == [
        (0, 0, 0, 0)
    ] * 2


# --- cancels ---


def test_a_cancel_goes_to_the_granted_instance_until_it_is_answered() -> None:
    world = World()
    key = world.grant("c1", "u1", ranked=("i-2",)).grant.key
    sent = only(world.step(CancelCall(call_id="c1")), SendCancel)
    assert sent == [SendCancel(instance="i-2", key=key)]
    world.now_s = 0.5
    assert only(world.step(Tick()), SendCancel) == sent
    world.step(CancelAnswered(key=key, outcome="stopped"))
    world.now_s = 1.2
    assert only(world.step(Tick()), SendCancel) == []


def test_an_instance_that_never_saw_a_cancelled_run_frees_its_charge_at_once() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.step(CancelCall(call_id="c1"))
    world.step(CancelAnswered(key=granted.grant.key, outcome="unknown"))
    assert world.committed_s() == 0


def test_a_listed_run_of_a_cancelled_call_is_cancelled_again() -> None:
    world = World()
    granted = world.grant("c1", "u1")
    world.step(CancelCall(call_id="c1"))
    world.step(CancelAnswered(key=granted.grant.key, outcome="stopped"))
    assert len(only(world.beat(live=(granted.grant,)), SendCancel)) == 1


def test_a_listed_run_of_an_overtaken_attempt_is_cancelled() -> None:
    world = World()
    first = world.grant("c1", "u1", ranked=("i-1",))
    second = world.grant("c1", "u1", attempt=2, ranked=("i-2",))
    sent = only(world.beat("i-1", live=(first.grant,)), SendCancel)
    assert sent == [SendCancel(instance="i-1", key=first.grant.key)]
    assert only(world.beat("i-2", live=(second.grant,)), SendCancel) == []


def test_a_cancel_is_not_repeated_to_an_instance_that_is_gone() -> None:
    world = World()
    world.grant("c1", "u1", ranked=("i-1",))
    world.step(CancelCall(call_id="c1"))
    world.now_s = 6.0
    world.step(Tick())
    assert only(world.effects, SendCancel) == []
    assert world.admission.books.cancels == {}


# --- the session's story ---


def test_a_session_is_told_once_at_its_first_grant() -> None:
    world = World()
    world.end(world.grant("c1", "u1", session="s"), "u1")
    assert [e.session for e in only(world.effects, SessionStarted)] == []
    world.grant("c2", "u2", session="t")
    assert [e.session for e in only(world.effects, SessionStarted)] == ["t"]


def test_the_gap_before_a_call_is_told_when_it_arrives() -> None:
    world = World()
    first = world.grant("c1", "u1", session="s")
    world.end(first, "u1")
    world.settle(first, 0, 0.3)
    world.now_s = 0.9
    world.grant("c2", *RETURN, session="s")
    (gap,) = only(world.effects, ToolGap)
    assert (gap.start_unix_s, gap.end_unix_s) == pytest.approx((1000.3, 1000.9))


def test_a_gap_is_told_when_the_earlier_calls_account_comes_late() -> None:
    world = World()
    first = world.grant("c1", "u1", session="s")
    world.end(first, "u1")
    world.now_s = 0.9
    world.grant("c2", *RETURN, session="s")
    assert only(world.effects, ToolGap) == []
    (gap,) = only(world.settle(first, 0, 0.3), ToolGap)
    assert (gap.start_unix_s, gap.end_unix_s) == pytest.approx((1000.3, 1000.9))


def test_there_is_no_gap_while_another_call_is_open() -> None:
    world = World()
    first = world.grant("c1", "u1", session="s")
    world.grant("c2", "v1", session="s")
    world.end(first, "u1")
    world.settle(first, 0, 0.3)
    world.now_s = 0.9
    world.grant("c3", *RETURN, session="s")
    assert only(world.effects, ToolGap) == []


def test_a_session_that_ends_waits_for_the_front_doors_account() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s", is_final=True)
    world.end(granted, "u1")
    assert only(world.effects, SessionOver) == []
    (over,) = only(world.settle(granted, 0, 2, is_final=True), SessionOver)
    assert (over.end, over.row.sct_s, over.row.calls) == ("final", pytest.approx(2), 1)


def test_a_session_whose_account_never_comes_is_told_all_the_same() -> None:
    world = World()
    world.end(world.grant("c1", "u1", session="s", is_final=True), "u1")
    told: list[SessionOver] = []
    while world.now_s < 6:
        world.now_s += 0.5
        told += only(world.beat(), SessionOver)
    assert [e.row.id for e in told] == ["s"]


def test_a_graceful_stop_tells_open_sessions_and_leaves_their_rows_open() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.end(granted, "u1")
    world.settle(granted, 0, 1)
    (over,) = only(world.step(Closing()), SessionOver)
    assert (over.row.id, over.end) == ("s", "shutdown")
    assert world.admission.row("", "s").state == "open"


# --- restart ---


def a_successor(*snapshots: Snapshot, rows: tuple[SessionRow, ...] = (), epoch: int = 2) -> World:
    world = World()
    world.admission = Admission(world.config, world.policy)
    world.step(Loaded(rows=rows, unix_s=2000.0))
    for snapshot in snapshots:
        world.step(snapshot)
    world.step(Opened(epoch=epoch))
    return world


def test_a_new_leaders_epoch_is_above_all_that_instances_have_seen() -> None:
    world = a_successor(a_snapshot("i-1", epoch_seen=7))
    assert world.grant("c1", "u1").grant.epoch == 8


def test_an_instance_that_comes_later_raises_the_epoch() -> None:
    world = a_successor(a_snapshot("i-1"))
    world.step(a_snapshot("i-2", epoch_seen=9))
    assert world.grant("c1", "u1").grant.epoch == 10


def test_a_new_leader_knows_the_running_calls() -> None:
    before = World()
    granted = before.grant("c1", "u1", session="s", ranked=("i-1",))
    world = a_successor(a_snapshot("i-1", live=(granted.grant,)), a_snapshot("i-2"))
    assert world.admission.row("", "s").in_flight == 1
    again = world.grant("c1", "u1", session="s", attempt=2)
    assert (again.session, again.call_index) == ("s", 0)


def test_a_new_leader_repeats_the_grant_of_a_call_that_it_finds_running() -> None:
    before = World()
    granted = before.grant("c1", "u1", session="s", ranked=("i-1",))
    world = a_successor(a_snapshot("i-1", live=(granted.grant,)), a_snapshot("i-2"))
    again = world.grant("c1", "u1", session="s", ranked=("i-2",))
    assert (again.grant, again.reason) == (granted.grant, PlaceReason.REPEATED)


def test_a_grant_of_the_leader_before_may_come_to_light_late() -> None:
    old = World().grant("c1", "u1", session="s", ranked=("i-1",))
    world = a_successor(a_snapshot("i-1"), a_snapshot("i-2"))
    new = world.grant("c2", "u2", session="s", ranked=("i-1",))
    world.step(a_snapshot("i-1", version=2, live=(old.grant, new.grant)))
    assert world.admission.row("", "s").calls == 2


def test_a_closed_session_of_the_backup_is_not_found_by_the_calls_still_running_in_it() -> None:
    before = World()
    grants = [before.grant(f"c{n}", f"u{n}", session="s", ranked=("i-1",)) for n in range(2)]
    before.step(EndSession(session="s"))
    row = before.admission.row("", "s")
    assert row is not None
    live = tuple(
        LiveGrant(grant=g.grant, session="s", call_index=n, tail=chain(f"u{n}")[-1])
        for n, g in enumerate(grants)
    )
    snapshot = Snapshot(instance="i-1", boot_id="b1", version=1, live_grants=live)
    world = a_successor(snapshot, a_snapshot("i-2"), rows=(row,))
    world.admission.check()
    assert world.grant("c9", "u0", "a:x", "more", ranked=("i-2",)).session != "s"


def test_a_new_leader_rebuilds_leases_from_what_ended() -> None:
    before = World()
    granted = before.grant("c1", "u1", session="s", ranked=("i-1",))
    end = an_end(granted, chain("u1")[-1], age_s=0.2)
    world = a_successor(a_snapshot("i-2"), a_snapshot("i-1", ended=(end,)))
    back = world.grant("c2", *RETURN, session="s", ranked=("i-2",))
    assert (back.reason, back.grant.instance, back.call_index) == (PlaceReason.LEASE, "i-1", 1)


def test_a_new_leader_rebuilds_no_lease_that_some_list_names_as_consumed() -> None:
    before = World()
    first = before.grant("c1", "u1", session="s", ranked=("i-1",))
    before.end(first, "u1")
    second = before.grant("c2", *RETURN, session="s")
    assert second.reason is PlaceReason.LEASE
    end = an_end(first, chain("u1")[-1])
    world = a_successor(a_snapshot("i-1", ended=(end,), live=(second.grant,)), a_snapshot("i-2"))
    assert world.committed_s() == 0


def test_a_new_leader_continues_the_sessions_of_the_backup() -> None:
    before = World()
    first = before.grant("c1", "u1")
    before.end(first, "u1")
    before.settle(first, 0, 1)
    row = before.admission.row("", first.session)
    assert row is not None
    world = a_successor(a_snapshot("i-1"), a_snapshot("i-2"), rows=(row,))
    again = world.grant("c2", *RETURN)
    assert (again.session, again.call_index) == (first.session, 1)
    assert world.admission.row("", first.session).usage == row.usage


def test_a_call_counted_in_the_backup_is_not_counted_again() -> None:
    before = World()
    first = before.grant("c1", "u1", session="s", ranked=("i-1",))
    before.end(first, "u1")
    row = before.admission.row("", "s")
    assert row is not None
    end = an_end(first, chain("u1")[-1])
    world = a_successor(a_snapshot("i-1", ended=(end,)), rows=(row,))
    after = world.admission.row("", "s")
    assert after is not None
    assert (after.calls, after.usage) == (1, row.usage)


def test_a_steady_leader_ignores_ends_that_it_does_not_know() -> None:
    world, other = World(), World()
    world.beat(ended=(an_end(other.grant("c1", "u1", session="s"), chain("u1")[-1]),))
    assert world.admission.row("", "s") is None


def test_grant_numbers_of_two_leaders_never_meet() -> None:
    first = World().grant("c1", "u1").grant.n
    second = a_successor(a_snapshot("i-1"), epoch=2).grant("c1", "u1").grant.n
    assert first != second


def test_entries_of_another_instance_or_boot_are_not_taken() -> None:
    world = World()
    stray = LiveGrant(
        grant=World().grant("c9", "u9", ranked=("i-2",)).grant, session="s", call_index=0
    )
    world.step(Snapshot(instance="i-1", boot_id="b1", version=99, live_grants=(stray,), models=()))
    assert world.admission.row("", "s") is None
    assert CallKey("c9") not in world.admission.books.account.instances["i-1"].open
    assert stray.grant.model == MODEL


def test_only_the_first_snapshot_that_lists_a_call_has_its_session_saved() -> None:
    world = World()
    granted = world.grant("c1", "u", session="s")
    assert len(only(world.beat("i-1", live=(granted.grant,)), RowChanged)) == 1
    assert only(world.beat("i-1", live=(granted.grant,)), RowChanged) == []
