"""Every NATS subject, in one place: `talaria.v1.{cmd|evt|state}.<entity>.<id>.<name>`. Pure.

No other module formats a subject. Ids become one subject token by `slug`.
"""

from __future__ import annotations

import re
from typing import Final

ROOT: Final = "talaria.v1"

# The public API: the same JSON bodies as over HTTP, answered on the caller's inbox.
CHAT: Final = f"{ROOT}.chat.completions"
COMPLETIONS: Final = f"{ROOT}.completions"
MODELS: Final = f"{ROOT}.models"

# Commands to whichever member of a service takes them (queue groups).
PLACE: Final = f"{ROOT}.cmd.router.any.place"
ADMIT: Final = f"{ROOT}.cmd.admission.leader.admit"
SESSIONS: Final = f"{ROOT}.cmd.admission.leader.sessions"
KVSTORE: Final = f"{ROOT}.cmd.kvstore.any.query"

# Events and state, heard by all who care.
ANY_CANCEL: Final = f"{ROOT}.evt.call.*.cancel"
ANY_CALL_ENDED: Final = f"{ROOT}.evt.call.*.ended"
ANY_CALL_SETTLED: Final = f"{ROOT}.evt.call.*.settled"
ANY_SNAPSHOT: Final = f"{ROOT}.state.instance.*.snapshot"
ANY_KV: Final = f"{ROOT}.evt.instance.*.kv"
LOAD: Final = f"{ROOT}.state.admission.leader.load"

# JetStream key-value buckets.
SESSION_BUCKET: Final = "talaria-sessions"
LEADER_BUCKET: Final = "talaria-leader"

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


def slug(name: str) -> str:
    """`name` as one subject token and KV key: other bytes become `=xx`, so that two names never meet."""
    if _PLAIN.fullmatch(name):
        return name
    return "".join(
        c if _PLAIN.fullmatch(c) else "".join(f"={b:02x}" for b in c.encode()) for c in name
    )


def session_key(tenant: str, session: str) -> str:
    """Key of a session's row in SESSION_BUCKET; the empty tenant is `=`, which no slug is."""
    return f"{slug(tenant) or '='}.{slug(session)}"


def cancel(call_id: str) -> str:
    """A client's cancel of a whole call: heard by every gateway and by admission."""
    return f"{ROOT}.evt.call.{slug(call_id)}.cancel"


def call_ended(call_id: str) -> str:
    """The one end of an accepted attempt."""
    return f"{ROOT}.evt.call.{slug(call_id)}.ended"


def call_settled(call_id: str) -> str:
    """The front door's account of a finished call."""
    return f"{ROOT}.evt.call.{slug(call_id)}.settled"


def run(instance: str) -> str:
    """Body of a granted call."""
    return f"{ROOT}.cmd.instance.{slug(instance)}.run"


def body_part(instance: str) -> str:
    """A piece of a body too large for one message; sent before its RunCall on the same connection."""
    return f"{ROOT}.cmd.instance.{slug(instance)}.body"


def attempt(instance: str) -> str:
    """CancelAttempt and Withdraw for one attempt on this instance."""
    return f"{ROOT}.cmd.instance.{slug(instance)}.attempt"


def instance_kv(instance: str) -> str:
    """Evictions that the kvstore asks of an instance."""
    return f"{ROOT}.cmd.instance.{slug(instance)}.kv"


def snapshot_request(instance: str) -> str:
    """Asks an instance for a snapshot now."""
    return f"{ROOT}.cmd.instance.{slug(instance)}.snapshot"


def snapshot(instance: str) -> str:
    """An instance's heartbeat."""
    return f"{ROOT}.state.instance.{slug(instance)}.snapshot"


def kv_events(instance: str) -> str:
    """Host KV prefixes saved and dropped by an instance."""
    return f"{ROOT}.evt.instance.{slug(instance)}.kv"


def gateway_notify(gateway: str) -> str:
    """What an instance tells the gateway that placed a call whose tokens go elsewhere."""
    return f"{ROOT}.evt.gateway.{slug(gateway)}.call"


def slots(instance: str) -> str:
    """Closed slots, for reports and traces."""
    return f"{ROOT}.evt.instance.{slug(instance)}.slot"


ANY_SLOT: Final = f"{ROOT}.evt.instance.*.slot"
