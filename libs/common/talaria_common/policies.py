"""Named policy sets: which rules of the design are on. Pure.

A set is data; the rules themselves live in the services' policy modules, which read it.
`NAME+switch=value` makes a variant, for example `round-only+slot_close=protected`.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta


class PolicySet(msgspec.Struct, frozen=True, kw_only=True):
    """The switches of one policy set, with their units."""

    name: str = "talaria"
    session_prefill: bool = True
    """SP: eligible continuations enter an open slot."""
    host_kv: bool = True
    """HKVR: the KV of finished calls is kept on the host and restored after a switch."""
    ring: Literal["live", "static"] = "live"
    """`live`: only models with work get a slot. `static`: idle models are switched through too."""
    slot_close: Literal["planned_end", "protected"] = "planned_end"
    """How a slot without SP closes: when its plan ends, or once protected decode is spent."""
    lease_tau_s: Annotated[float, Meta(ge=0)] = 1.0
    """Lifetime of a lease (A2); 0 makes none."""
    lease_charge_s: Annotated[float, Meta(ge=0)] = 0.5
    """Admission unit that a lease charges, in instance-seconds (`paper`: a constant)."""
    linger_s: Annotated[float, Meta(ge=0)] = 0.6
    """How long an open slot with SP waits without work for returns while others wait."""


POLICY_SETS: Final[dict[str, PolicySet]] = {
    "talaria": PolicySet(name="talaria"),
    "no-sp": PolicySet(name="no-sp", session_prefill=False),
    "no-hkvr": PolicySet(name="no-hkvr", host_kv=False),
    # planned_end is the stronger of the two close rules, so it is what headlines are quoted against.
    "round-only": PolicySet(
        name="round-only", session_prefill=False, host_kv=False, lease_tau_s=0.0
    ),
}


def policy_set(spec: str) -> PolicySet:
    """The set that `NAME` or `NAME+switch=value[+switch=value]` names; ValueError says what is wrong."""
    name, *switches = spec.split("+")
    if name not in POLICY_SETS:
        near = difflib.get_close_matches(name, POLICY_SETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown policy {name!r}{hint} (known: {', '.join(POLICY_SETS)})")
    changes: dict[str, Any] = {}
    for switch in switches:
        key, equals, value = switch.partition("=")
        if not equals or key not in PolicySet.__struct_fields__ or key == "name":
            known = ", ".join(f for f in PolicySet.__struct_fields__ if f != "name")
            raise ValueError(f"bad switch {switch!r} in {spec!r}: want switch=value of {known}")
        changes[key] = value
    fields = msgspec.to_builtins(POLICY_SETS[name]) | changes | {"name": spec}
    try:
        return msgspec.convert(fields, PolicySet, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"bad policy {spec!r}: {error}") from error
