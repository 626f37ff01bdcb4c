"""Whose call it is: named, extending, repeating, forking, new."""

from __future__ import annotations

import pytest

from talaria_admission.config import AdmissionConfig
from talaria_admission.sessions import Session
from talaria_common.wire import EndReason, EndSession, GetSession, NotGranted, SessionList
from tests.unit.admission_worlds import World, chain


def the_session(world: World, session: str, tenant: str = "") -> Session:
    found = world.admission.books.sessions.get(tenant, session)
    assert found is not None
    return found


def a_finished_call(world: World, call_id: str, *messages: str, **more: object) -> str:
    granted = world.grant(call_id, *messages, **more)
    world.end(granted, *messages)
    return granted.session


def test_a_chain_that_extends_the_last_prompt_continues_its_session() -> None:
    world = World()
    session = a_finished_call(world, "c1", "sys", "u1")
    again = world.grant("c2", "sys", "u1", "a:r1", "u2")
    assert (again.session, again.source, again.call_index) == (session, "derived", 1)
    assert again.is_continuation


def test_an_equal_chain_repeats_only_when_nothing_is_in_flight() -> None:
    world = World()
    first = world.grant("c1", "sys", "u1")
    beside = world.grant("c2", "sys", "u1")
    assert beside.session != first.session
    world.end(first, "sys", "u1")
    world.end(beside, "sys", "u1")
    assert world.grant("c3", "sys", "u1").session == first.session


def test_a_shared_opening_message_alone_makes_no_fork() -> None:
    world = World()
    a_finished_call(world, "c1", "sys", "u1")
    other = world.grant("c2", "sys", "u2")
    assert (other.session, other.parent) == ("fresh-2", None)


def test_a_chain_that_leaves_the_history_before_its_end_is_a_fork() -> None:
    world = World()
    session = a_finished_call(world, "c1", "sys", "u1")
    a_finished_call(world, "c2", "sys", "u1", "a:r1", "u2")
    fork = world.grant("c3", "sys", "u1", "a:other", "u3")
    assert fork.session != session
    assert fork.parent == session
    assert the_session(world, fork.session).kind == "fork"


def test_an_old_opening_run_again_is_a_new_session() -> None:
    world = World()
    session = a_finished_call(world, "c1", "sys", "u1")
    a_finished_call(world, "c2", "sys", "u1", "a:r1", "u2")
    again = world.grant("c3", "sys", "u1")
    assert again.session != session
    assert again.parent is None


def test_a_parallel_call_that_extends_the_prompt_without_a_reply_is_a_fork() -> None:
    world = World()
    first = world.grant("c1", "sys", "u1")
    beside = world.grant("c2", "sys", "u1", "u2")
    assert beside.session != first.session
    assert beside.parent == first.session
    assert beside.reason == "ranked"


def test_of_two_equal_openings_each_return_goes_to_the_one_that_gave_its_reply() -> None:
    world = World()
    first, second = world.grant("c1", "u1"), world.grant("c2", "u1")
    world.end(first, "u1", reply=chain("u1", "a:x")[-1].digest)
    world.end(second, "u1", reply=chain("u1", "a:y")[-1].digest)
    assert world.grant("c3", "u1", "a:y", "u2").session == second.session
    assert world.grant("c4", "u1", "a:x", "u2").session == first.session


def test_best_of_two_with_equal_replies_stay_two_sessions() -> None:
    world = World()
    first, second = world.grant("c1", "u1"), world.grant("c2", "u1")
    for granted in (first, second):
        world.end(granted, "u1", reply=chain("u1", "a:x")[-1].digest)
    returns = {world.grant(c, "u1", "a:x", "u2").session for c in ("c3", "c4")}
    assert returns == {first.session, second.session}


def test_a_derived_session_is_of_one_tenant() -> None:
    world = World()
    session = a_finished_call(world, "c1", "u1", tenant="t1")
    assert world.grant("c2", "u1", "a:x", "u2", tenant="t2").session != session


def test_equal_ids_of_two_tenants_are_two_sessions() -> None:
    world = World()
    for tenant, call_id in (("t1", "c1"), ("t2", "c2"), ("t2", "c3")):
        a_finished_call(world, call_id, call_id, session="s", tenant=tenant)
    counts = [the_session(world, "s", t).calls_accepted for t in ("t1", "t2")]
    assert counts == [1, 2]


def test_one_tenant_does_not_see_anothers_session() -> None:
    world = World()
    a_finished_call(world, "c1", "u", session="s", tenant="t1")
    (answer,) = (e for e in world.step(GetSession(tenant="t2", session="s")) if hasattr(e, "error"))
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "unknown_session"


def test_parallel_first_calls_of_one_id_make_one_session() -> None:
    world = World()
    granted = [world.grant(f"c{n}", f"u{n}", session="s") for n in range(4)]
    assert {g.call_index for g in granted} == {0, 1, 2, 3}
    for n, one in enumerate(granted):
        world.end(one, f"u{n}")
    assert the_session(world, "s").calls_accepted == 4


def test_a_call_without_id_and_chain_is_a_session_of_its_own() -> None:
    world = World()
    first, second = world.grant("c1"), world.grant("c2")
    assert (first.source, second.source) == ("none", "none")
    assert first.session != second.session


def test_a_parent_is_recorded() -> None:
    world = World()
    a_finished_call(world, "c1", "u1", session="p")
    child = world.grant("c2", "u2", session="c", parent="p")
    assert child.parent == "p"
    assert the_session(world, "c").kind == "child"


def test_the_id_of_a_session_that_a_final_call_closed_starts_anew() -> None:
    world = World()
    a_finished_call(world, "c1", "u1", session="s")
    final = world.grant("c2", "u1", "a:x", "u2", session="s", is_final=True)
    world.end(final, "u1", "a:x", "u2")
    assert the_session(world, "s").row(1).state == "closed"
    again = world.grant("c3", "u3", session="s")
    assert (again.call_index, again.is_continuation) == (0, False)
    world.end(again, "u3")
    assert the_session(world, "s").calls_accepted == 1


def test_a_closed_session_is_not_found_by_its_chain() -> None:
    world = World()
    session = a_finished_call(world, "c1", "u1")
    world.step(EndSession(session=session))
    assert world.grant("c2", "u1", "a:x", "u2").session != session


def test_a_refused_call_opens_no_session() -> None:
    world = World()
    answer = world.admit("c1", "u1", session="s", ranked=())
    assert isinstance(answer, NotGranted)
    assert answer.error.code == "no_instance"
    assert world.admission.books.sessions.get("", "s") is None


def test_a_session_whose_only_call_was_never_accepted_counts_none() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.settle(granted, 0, 1)
    row = the_session(world, "s").row(1)
    assert (row.calls, row.in_flight, row.instance) == (0, 0, None)


def test_a_document_lists_what_was_decided_for_each_call() -> None:
    world = World()
    for n in range(3):
        a_finished_call(world, f"c{n}", f"u{n}", session="s")
    (answer,) = (e for e in world.step(GetSession(session="s")) if isinstance(e, SessionList))
    assert [d.call_index for d in answer.decisions] == [0, 1, 2]
    assert all(d.instance and d.reason for d in answer.decisions)


def test_usage_is_of_all_attempts_that_counted_and_of_each_once() -> None:
    world = World()
    granted = world.grant("c1", "u1", session="s")
    world.end(granted, "u1")
    world.end(granted, "u1")
    assert the_session(world, "s").usage.prompt_tokens == 10


def test_an_idle_session_ends_and_a_busy_one_does_not() -> None:
    world = World()
    a_finished_call(world, "c1", "u1", session="idle")
    busy = world.grant("c2", "u2", session="busy")
    for _ in range(700):
        world.now_s += 0.5
        world.beat("i-1", live=(busy.grant,))
    assert the_session(world, "idle").is_closed
    assert not the_session(world, "busy").is_closed


def test_a_full_table_makes_room_by_ending_the_longest_idle() -> None:
    world = World(config=AdmissionConfig(sessions_max=2))
    for n in range(3):
        a_finished_call(world, f"c{n}", f"u{n}", session=f"s{n}")
        world.pass_s(1)
    assert [the_session(world, f"s{n}").is_closed for n in range(3)] == [True, False, False]


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.FAILED])
def test_a_call_that_did_not_finish_can_be_repeated_in_its_session(reason: EndReason) -> None:
    world = World()
    granted = world.grant("c1", "u1")
    world.end(granted, "u1", reason=reason)
    assert world.grant("c2", "u1").session == granted.session
