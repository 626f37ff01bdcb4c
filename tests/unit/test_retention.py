"""Which KV prefixes are evicted first."""

from __future__ import annotations

from talaria_kvstore.retention import Candidate, choose_evictions


def candidate(
    name: str, parent: str = "", *, used_s: float = 0.0, nbytes: int = 10, on: str = "i-1"
) -> Candidate:
    return Candidate(
        instance=on,
        prefix=name.encode(),
        parent=parent.encode(),
        nbytes=nbytes,
        last_use_s=used_s,
    )


def names(chosen: tuple[Candidate, ...]) -> list[str]:
    return [c.prefix.decode() for c in chosen]


def test_nothing_goes_without_an_excess() -> None:
    assert choose_evictions([candidate("a")], 0) == ()


def test_the_least_recently_used_goes_first() -> None:
    held = [candidate("a", used_s=3), candidate("b", used_s=1), candidate("c", used_s=2)]
    assert names(choose_evictions(held, 15)) == ["b", "c"]


def test_a_leaf_goes_before_its_older_parent() -> None:
    chain = [
        candidate("a", used_s=1),
        candidate("ab", "a", used_s=9),
        candidate("abc", "ab", used_s=9),
    ]
    assert names(choose_evictions(chain, 20)) == ["abc", "ab"]


def test_a_shared_parent_stays_until_its_last_child_goes() -> None:
    tree = [candidate("a"), candidate("ab", "a", used_s=1), candidate("ac", "a", used_s=2)]
    assert names(choose_evictions(tree, 11)) == ["ab", "ac"]
    assert names(choose_evictions(tree, 30)) == ["ab", "ac", "a"]


def test_a_chain_on_another_instance_protects_nothing_here() -> None:
    held = [candidate("a", used_s=1), candidate("ab", "a", used_s=9, on="i-2")]
    assert names(choose_evictions(held, 10)) == ["a"]


def test_more_than_there_is_frees_all_there_is() -> None:
    held = [candidate("a"), candidate("ab", "a")]
    assert names(choose_evictions(held, 10_000)) == ["ab", "a"]


def test_ties_break_by_name() -> None:
    held = [candidate("b"), candidate("a", on="i-2"), candidate("c")]
    assert [c.instance for c in choose_evictions(held, 30)] == ["i-1", "i-1", "i-2"]
    assert names(choose_evictions(held, 30)) == ["b", "c", "a"]
