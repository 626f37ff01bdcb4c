"""The KV registry under any history of events, and the retention over any forest of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from talaria_common.wire import KvEntry
from talaria_kvstore.registry import Registry
from talaria_kvstore.retention import Candidate, choose_evictions

INSTANCES = ("i-1", "i-2")
SILENT_S = 1e9

Event = tuple[str, Sequence[bytes]]

names = st.text("ab", min_size=1, max_size=4).map(str.encode)
saves = st.tuples(st.just("save"), st.lists(names, max_size=4))
drops = st.tuples(st.just("drop"), st.lists(names, max_size=4))
boots: st.SearchStrategy[Event] = st.tuples(st.just("boot"), st.just([]))
evictions: st.SearchStrategy[Event] = st.tuples(st.just("evict"), st.just([]))
histories = st.lists(st.one_of(saves, drops, boots), max_size=12)


def entry(prefix: bytes) -> KvEntry:
    # The size follows from the name, as one block's size is the same whoever tells of it.
    return KvEntry(prefix=prefix, parent=prefix[:-1], model="m", tokens=16, nbytes=len(prefix))


def apply(registry: Registry, instance: str, event: Event, lives: dict[str, int]) -> None:
    kind, prefixes = event
    if kind == "boot":
        lives[instance] += 1
    registry.hear(instance, f"boot-{lives[instance]}", 0.0)
    match kind:
        case "save":
            registry.save(instance, [entry(p) for p in prefixes], 0.0)
        case "drop":
            registry.drop(instance, prefixes)
        case "evict":
            chosen = choose_evictions(registry.candidates(0.0, SILENT_S), 3)
            registry.ask(chosen, 0.0)
    registry.check()


def holdings(registry: Registry) -> set[tuple[str, bytes]]:
    return {(c.instance, c.prefix) for c in registry.candidates(0.0, SILENT_S)}


@given(st.lists(st.tuples(st.sampled_from(INSTANCES), st.one_of(saves, drops, evictions))))
def test_accounting_returns_to_zero_when_all_is_dropped(events: list[tuple[str, Event]]) -> None:
    registry, lives = Registry(), dict.fromkeys(INSTANCES, 0)
    told: set[bytes] = set()
    for instance, event in events:
        apply(registry, instance, event, lives)
        told |= set(event[1])
    for instance in INSTANCES:
        apply(registry, instance, ("drop", sorted(told)), lives)
    assert registry.entries == 0
    assert registry.staying_bytes(0.0, SILENT_S) == 0
    assert set(registry.bytes_by_instance(0.0, SILENT_S).values()) <= {0}


@given(st.data())
def test_duplicates_and_any_interleaving_of_instances_converge(data: st.DataObject) -> None:
    by_instance = {instance: data.draw(histories) for instance in INSTANCES}
    plain, mixed = Registry(), Registry()
    lives = dict.fromkeys(INSTANCES, 0)
    for instance, events in by_instance.items():
        for event in events:
            apply(plain, instance, event, lives)
    lives = dict.fromkeys(INSTANCES, 0)
    left = {instance: list(events) for instance, events in by_instance.items()}
    while any(left.values()):
        instance = data.draw(st.sampled_from([i for i in INSTANCES if left[i]]))
        event = left[instance].pop(0)
        copies = 1 if event[0] == "boot" else data.draw(st.integers(1, 2))
        for _ in range(copies):
            apply(mixed, instance, event, lives)
    assert holdings(mixed) == holdings(plain)
    assert mixed.bytes_by_instance(0.0, SILENT_S) == plain.bytes_by_instance(0.0, SILENT_S)


@given(st.permutations([entry(b"a"), entry(b"ab"), entry(b"abc"), entry(b"abb"), entry(b"b")]))
def test_saves_converge_in_any_order(entries: list[KvEntry]) -> None:
    registry = Registry()
    registry.hear("i-1", "boot", 0.0)
    for one in entries:
        registry.save("i-1", [one], 0.0)
        registry.check()
    assert registry.lookup("m", [b"a", b"ab", b"abc"], 0.0, SILENT_S) == {"i-1": 3}


candidate_sets = st.dictionaries(
    st.tuples(st.sampled_from(INSTANCES), names),
    st.tuples(st.integers(1, 5), st.integers(0, 3)),
    max_size=20,
)


@given(candidate_sets, st.integers(0, 60))
def test_eviction_is_leaf_first_and_frees_no_more_than_needed(
    held: dict[tuple[str, bytes], tuple[int, int]], excess_bytes: int
) -> None:
    candidates = [
        Candidate(
            instance=instance,
            prefix=prefix,
            parent=prefix[:-1],
            nbytes=nbytes,
            last_use_s=float(used_s),
        )
        for (instance, prefix), (nbytes, used_s) in held.items()
    ]
    chosen = choose_evictions(candidates, excess_bytes)
    there = set(held)
    for candidate in chosen:
        children = {n for i, n in there if i == candidate.instance and n[:-1] == candidate.prefix}
        assert not children, f"{candidate.prefix!r} went before {children}"
        leaves = [
            held[i, n][1] for i, n in there if not any(j == i and o[:-1] == n for j, o in there)
        ]
        assert candidate.last_use_s == min(leaves)
        there.remove((candidate.instance, candidate.prefix))
    freed_bytes = sum(c.nbytes for c in chosen)
    all_bytes = sum(c.nbytes for c in candidates)
    assert freed_bytes >= min(excess_bytes, all_bytes)
    assert freed_bytes - (chosen[-1].nbytes if chosen else 0) < max(excess_bytes, 1)
