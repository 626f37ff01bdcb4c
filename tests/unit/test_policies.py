"""Named policy sets and their variants."""

from __future__ import annotations

import pytest

from talaria_common.policies import POLICY_SETS, policy_set


def test_the_sets_of_the_replay_are_there() -> None:
    assert {"talaria", "round-only", "no-sp", "no-hkvr"} <= set(POLICY_SETS)
    assert all(name == held.name for name, held in POLICY_SETS.items())


def test_round_only_is_everything_off() -> None:
    held = policy_set("round-only")
    assert (held.session_prefill, held.host_kv, held.lease_tau_s) == (False, False, 0.0)


def test_ablations_differ_in_one_switch_each() -> None:
    full = policy_set("talaria")
    for name, switch in (("no-sp", "session_prefill"), ("no-hkvr", "host_kv")):
        differing = [
            field
            for field in full.__struct_fields__
            if getattr(full, field) != getattr(policy_set(name), field) and field != "name"
        ]
        assert differing == [switch]


def test_a_variant_changes_its_switches_and_keeps_its_name() -> None:
    spec = "round-only+slot_close=protected+lease_tau_s=2.5+host_kv=true"
    held = policy_set(spec)
    assert (held.name, held.slot_close, held.lease_tau_s) == (spec, "protected", 2.5)
    assert (held.host_kv, held.session_prefill) == (True, False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("talria", r"unknown policy 'talria'; did you mean 'talaria'\?"),
        ("xyz", r"unknown policy 'xyz' \(known: talaria"),
        ("", "unknown policy ''"),
        ("talaria+ring", r"bad switch 'ring'"),
        ("talaria+name=x", r"bad switch 'name=x'"),
        ("talaria+ringg=live", r"bad switch 'ringg=live'.*session_prefill"),
        ("talaria+ring=round", r"bad policy .*round"),
        ("talaria+lease_tau_s=-1", r"bad policy"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_set(spec)
