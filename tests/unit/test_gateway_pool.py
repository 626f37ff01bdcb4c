"""The gateway's view of instances, and the gauges made of it."""

from __future__ import annotations

from talaria_common.wire import ModelState, Snapshot
from talaria_gateway.pool import FRESH_S, GONE_S, Held, ModelGauges, Pool


def snapshot(
    instance: str = "i-1",
    *,
    version: int = 1,
    boot_id: str = "b1",
    running: int = 0,
    waiting: int = 0,
    is_ready: bool = True,
    model: str = "m",
) -> Snapshot:
    state = ModelState(
        model=model,
        residency="active",
        calls_running=running,
        calls_waiting=waiting,
        max_model_len=2048,
    )
    return Snapshot(
        instance=instance, boot_id=boot_id, version=version, is_ready=is_ready, models=(state,)
    )


def pool(*snapshots: Snapshot) -> Pool:
    pool = Pool()
    for one in snapshots:
        pool.hear(one, 0.0)
    return pool


def test_only_fresh_instances_that_say_so_are_ready() -> None:
    heard = pool(snapshot("i-1"), snapshot("i-2", is_ready=False))
    assert heard.ready(FRESH_S) == ["i-1"]
    assert heard.ready(FRESH_S + 0.1) == []


def test_an_older_version_of_the_same_boot_is_ignored_and_a_new_boot_is_not() -> None:
    heard = pool(snapshot(version=5, running=1), snapshot(version=4, running=9))
    assert heard.gauges({}, 0.0)["m"] == ModelGauges(1, 0)
    assert not heard.has_restarted("i-1", "b1")
    heard.hear(snapshot(version=1, boot_id="b2"), 0.0)
    assert heard.has_restarted("i-1", "b1")


def test_gauges_add_up_over_instances_until_they_are_gone() -> None:
    heard = pool(snapshot("i-1", running=1, waiting=2), snapshot("i-2", running=3))
    assert heard.gauges({}, 1.0)["m"] == ModelGauges(4, 2)
    heard.hear(snapshot("i-2", version=2), 4.0)
    assert heard.gauges({}, GONE_S + 0.1)["m"] == ModelGauges(0, 0)


def test_calls_that_no_snapshot_shows_yet_count_as_running() -> None:
    heard = pool(snapshot(running=1, waiting=1))
    assert heard.gauges({"m": 3}, 0.0)["m"] == ModelGauges(2, 1)
    assert heard.gauges({"m": 2}, 0.0)["m"] == ModelGauges(1, 1)


def test_a_model_stays_listed_while_its_instances_are_away() -> None:
    heard = pool(snapshot(model="a"), snapshot("i-2", model="b"))
    heard.forget("i-1")
    assert heard.models() == {"a": 2048, "b": 2048}
    assert heard.age_s("i-1", 0.0) == float("inf")


def test_a_call_between_two_snapshots_is_shown_a_moment_longer() -> None:
    held = Held()
    held.add("m")
    held.drop("m", 1.0)
    assert held.counts(1.0 + Held.LINGER_S / 2) == {"m": 1}
    assert held.counts(1.0 + Held.LINGER_S) == {"m": 0}
