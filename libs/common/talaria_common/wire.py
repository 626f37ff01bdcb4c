"""Messages between the services. Pure.

MessagePack on the bus (the public NATS API speaks JSON: `StreamMessage` is encoded either way).
One union and one decoder per receiver. New fields have defaults, unknown fields are skipped.
Instants do not cross the wire, durations do; the two exceptions are wall-clock times for traces
and SCT (`*_unix_s`), stamped by the front door alone. docs/messages.md is generated from here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

# Every number has an upper bound, so that what is made from numbers that came can be sent.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Attempt: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=2**30)]
Serial: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Grows over all epochs: the epoch in its upper, a count in its lower 32 bits."""

Tier: TypeAlias = Literal["device", "host", "disk", "remote", "absent"]
"""Where a prefix is, best first."""

Residency: TypeAlias = Literal["active", "staged", "host", "disk", "absent"]
"""Where a model's weights are, best first."""

Endpoint: TypeAlias = Literal["chat", "completions"]
SessionSource: TypeAlias = Literal["header", "native", "body", "derived", "none"]
Encoding: TypeAlias = Literal["msgpack", "json"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message; subclasses carry a tag."""


# --- values -------------------------------------------------------------------------------------


class CallKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Idempotency key of one attempt at one call, everywhere."""

    call_id: str
    attempt: Attempt = 1

    def __str__(self) -> str:
        return f"{self.call_id}/{self.attempt}"


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One link of a message chain: the hash of everything up to and including a message."""

    digest: bytes
    end_bytes: Count
    """Canonical bytes of the prompt up to and including this message."""
    is_reply: bool = False
    """The message is the assistant's."""


class HeldPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A prompt prefix that an instance can reuse, named by the chain link it ends at."""

    digest: bytes
    tokens: Count
    tier: Tier


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one call; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class CallParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where an accepted call's time went on its instance: a partition of acceptance to last token."""

    queue_s: Seconds = 0.0
    switch_s: Seconds = 0.0
    restore_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A TalariaError on the wire."""

    code: str
    detail: str
    param: str | None = None
    retry_after_s: Seconds | None = None


class CostTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Cost(r, i) of equation (1), split; seconds."""

    load_s: Seconds = 0.0
    """dR: queue, prefill and decode seconds that the call adds."""
    kv_s: Seconds = 0.0
    """C_kv: 0 on the device, restore time on the host, recompute time otherwise."""
    activate_s: Seconds = 0.0
    """C_act: 0 if active, the switch if resident, the full open otherwise."""

    @property
    def total_s(self) -> float:
        return self.load_s + self.kv_s + self.activate_s


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that could take the call, as the router prices it."""

    instance: str
    boot_id: str
    cost: CostTerms
    charge_s: Seconds
    charge_blocks: Count = 0
    prefix_tier: Tier = "absent"
    prefix_tokens: Count = 0


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router believes the session's prefix is."""

    instance: str
    tier: Tier
    is_healthy: bool
    snapshot_age_s: Seconds


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Admission's permission for one attempt on one boot of one instance."""

    epoch: Epoch
    n: Serial
    key: CallKey
    instance: str
    boot_id: str
    model: str
    charge_s: Seconds
    charge_blocks: Count = 0
    lease_of: Serial | None = None
    """The grant whose end installed the lease that this one consumed."""


class PlaceReason(StrEnum):
    """Why a call went where it went."""

    LEASE = "lease"
    LEASE_IMPLIED = "lease_implied"
    RANKED = "ranked"
    REPEATED = "repeated"
    """The answer of an earlier identical request."""


class EndReason(StrEnum):
    """How an accepted attempt ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    INSTANCE_LOST = "instance_lost"


# --- placing: gateway -> router -> admission ----------------------------------------------------


class PlaceCall(Message, frozen=True, kw_only=True, tag="place_call"):
    """The gateway asks where to run a call: sizes and chain links, no body and no tokens."""

    key: CallKey
    model: str
    tenant: str = ""
    session: str | None = None
    """The caller's session id; None: derived from the chain."""
    source: SessionSource = "none"
    parent: str | None = None
    is_final: bool = False
    """The caller says that this is its session's last call."""
    links: tuple[Link, ...] = ()
    """The last 64 links of the message chain."""
    prompt_bytes: Count = 0
    max_tokens: Count = 0
    """Expected output length in tokens; 0: not stated."""
    excluded: tuple[str, ...] = ()
    ranked_last: tuple[str, ...] = ()
    arrived_unix_s: Seconds = 0.0


class AdmitCall(Message, frozen=True, kw_only=True, tag="admit_call"):
    """The router's ranking of a call, cheapest first."""

    place: PlaceCall
    ranked: tuple[Candidate, ...]
    home: Home | None = None
    load_version: Serial = 0
    """Version of the LoadState that the costs count; 0: of none."""


class Granted(Message, frozen=True, kw_only=True, tag="granted"):
    """Admission's yes; the router adds the time it took and passes it on."""

    grant: Grant
    session: str
    source: SessionSource
    call_index: Count
    parent: str | None = None
    reason: PlaceReason
    is_continuation: bool = False
    started_unix_s: Seconds = 0.0
    """First arrival of the session."""
    cost: CostTerms | None = None
    runner_up: str | None = None
    runner_up_cost: CostTerms | None = None
    place_s: Seconds = 0.0
    admit_s: Seconds = 0.0


class NotGranted(Message, frozen=True, kw_only=True, tag="not_granted"):
    """No place: `overloaded`, `no_instance`, `superseded`, `cancelled`, `session_closed`, ..."""

    key: CallKey
    error: ErrorInfo
    place_s: Seconds = 0.0
    admit_s: Seconds = 0.0


PlaceReply: TypeAlias = Granted | NotGranted


# --- running: gateway <-> instance --------------------------------------------------------------


class RunCall(Message, frozen=True, kw_only=True, tag="run_call"):
    """The body of a granted call. With `parts` > 0 the body came before, in BodyParts."""

    grant: Grant
    endpoint: Endpoint
    session: str
    call_index: Count
    tenant: str = ""
    is_continuation: bool = False
    is_final: bool = False
    body: bytes = b""
    parts: Count = 0
    digest: bytes = b""
    inbox: str
    """Subject of the stream messages; ends in the attempt."""
    encoding: Encoding = "msgpack"
    notify: str = ""
    """Subject that also gets FirstToken and Ended, when the inbox is not the gateway's."""
    tail: Link | None = None
    """Last link of the prompt's chain."""
    deadline_s: Seconds | None = None
    """Seconds from now after which the call is not worth starting."""
    started_unix_s: Seconds = 0.0
    """First arrival of the session, for its trace."""


class BodyPart(Message, frozen=True, kw_only=True, tag="body_part"):
    """One piece of a large body."""

    key: CallKey
    index: Count
    data: bytes


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """The instance has queued the attempt and will end it exactly once."""

    key: CallKey
    prompt_tokens: Count = 0


RefusalReason: TypeAlias = Literal[
    "full",
    "draining",
    "stale_epoch",
    "unknown_model",
    "not_ready",
    "cancelled",
    "invalid",
]


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The instance did not take the attempt; `invalid` carries the caller's error."""

    key: CallKey
    reason: RefusalReason
    error: ErrorInfo | None = None


class CancelAttempt(Message, frozen=True, kw_only=True, tag="cancel_attempt"):
    """Stop one attempt, whatever its state; answered with Withdrawn."""

    key: CallKey


class Withdraw(Message, frozen=True, kw_only=True, tag="withdraw"):
    """Stop one attempt unless a token of it has gone out."""

    key: CallKey


class Withdrawn(Message, frozen=True, kw_only=True, tag="withdrawn"):
    """`unknown`: never seen (and tombstoned); `stopped`: no token was sent; `tokens`: it goes on."""

    key: CallKey
    outcome: Literal["unknown", "stopped", "tokens"]


class CancelCall(Message, frozen=True, kw_only=True, tag="cancel_call"):
    """The client has left: all attempts of the call end. Published, repeated, remembered for 60 s."""

    call_id: str


InstanceCommand: TypeAlias = RunCall | BodyPart | CancelAttempt | Withdraw
RunReply: TypeAlias = Accepted | Refused


# --- the stream: instance -> inbox --------------------------------------------------------------


class ToolDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a tool call; `id` and `name` come with its first piece only."""

    index: Count
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Working(Message, frozen=True, kw_only=True, tag="working"):
    """Sign of life, at least each second, until tokens flow."""

    key: CallKey
    seq: Count
    """An instance numbers all stream messages of an attempt from 1; a gateway's own have 0."""
    state: Literal["placing", "queued", "paused", "running"] = "queued"


class Delta(Message, frozen=True, kw_only=True, tag="delta"):
    """Tokens of 10-20 ms, as text and tool-call pieces."""

    key: CallKey
    seq: Count
    text: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    tokens: Count = 0
    """Tokens in this message."""


class Ended(Message, frozen=True, kw_only=True, tag="ended"):
    """The last message of a stream."""

    key: CallKey
    seq: Count
    reason: EndReason
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    usage: Usage = Usage()
    parts: CallParts = CallParts()
    ttft_s: Seconds | None = None
    """Acceptance to first token."""
    error: ErrorInfo | None = None
    session: str = ""


class FirstToken(Message, frozen=True, kw_only=True, tag="first_token"):
    """Told to the placing gateway when the tokens go elsewhere."""

    key: CallKey


StreamMessage: TypeAlias = Working | Delta | Ended
Notice: TypeAlias = FirstToken | Ended


class CallStarted(Message, frozen=True, kw_only=True, tag="started"):
    """First message on the inbox of a NATS caller: what over HTTP would be response headers."""

    call_id: str
    request_id: str
    session: str
    source: SessionSource
    model: str
    instance: str


PublicMessage: TypeAlias = CallStarted | Working | Delta | Ended


# --- events and state ---------------------------------------------------------------------------


class CallEnded(Message, frozen=True, kw_only=True, tag="call_ended"):
    """One accepted attempt is over. Sent by its instance, for a finished call just before Ended."""

    grant: Grant
    tenant: str = ""
    session: str
    call_index: Count
    tail: Link | None = None
    reply: bytes = b""
    """Chain digest after the generated reply; empty if there is none."""
    reason: EndReason
    usage: Usage = Usage()
    parts: CallParts = CallParts()
    prefix_tier: Tier = "absent"
    is_final: bool = False
    age_s: Seconds = 0.0
    """Seconds since the end, when listed in a snapshot."""


class CallSettled(Message, frozen=True, kw_only=True, tag="call_settled"):
    """The front door's account of one call, accepted or not: what SCT is made of (protocols 13)."""

    key: CallKey
    tenant: str = ""
    session: str
    call_index: Count
    model: str
    instance: str = ""
    outcome: str
    """`finished`, `cancelled` or an error code."""
    arrived_unix_s: Seconds
    ended_unix_s: Seconds
    gateway_s: Seconds = 0.0
    place_s: Seconds = 0.0
    admit_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    parts: CallParts = CallParts()
    deliver_s: Seconds = 0.0
    usage: Usage = Usage()
    attempts: Count = 1
    is_final: bool = False


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one instance, as its snapshot tells it."""

    model: str
    residency: Residency
    calls_waiting: Count = 0
    calls_running: Count = 0
    remaining_s: Seconds = 0.0
    """Predicted work of its waiting and running calls."""
    queued_s: Seconds = 0.0
    """Predicted work ahead of a call that arrives now; decode of running calls counts only where
    they leave it no room."""
    next_slot_s: Seconds = 0.0
    """Until its next slot opens; 0 when it is active."""
    switch_s: Seconds = 0.0
    """To make it active, from where its weights are now."""
    prefill_fixed_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    decode_step_s: Seconds = 0.0
    restore_token_s: Seconds = 0.0
    kv_bytes_per_token: Count = 0
    block_tokens: Count = 0
    blocks_max: Count = 0
    """Blocks of the largest pool this model can have here."""
    max_model_len: Count = 0
    weight_bytes: Count = 0
    deadline_risk: Count = 0
    """Reserved iterations of recent rounds that did not fit."""


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """The open slot."""

    model: str
    phase: str
    remaining_s: Seconds


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """State of an instance: its heartbeat (each 0.5 s and on change, at most 10/s)."""

    instance: str
    boot_id: str
    version: Count
    epoch_seen: Epoch = 0
    engine: str = ""
    is_ready: bool = True
    is_draining: bool = False
    models: tuple[ModelState, ...] = ()
    slot: SlotState | None = None
    round_s: Seconds = 0.0
    """Length of the current round's plan."""
    blocks_free: Count = 0
    blocks_total: Count = 0
    queued_calls: Count = 0
    queued_body_bytes: Count = 0
    host_kv_bytes: Count = 0
    prefixes: tuple[HeldPrefix, ...] = ()
    live_grants: tuple[LiveGrant, ...] = ()
    ended: tuple[CallEnded, ...] = ()
    """Attempts that ended in the last 10 s."""


class LiveGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A run that the instance holds, under check or accepted."""

    grant: Grant
    tenant: str = ""
    session: str
    call_index: Count
    tail: Link | None = None
    is_accepted: bool = True


class SnapshotRequest(Message, frozen=True, kw_only=True, tag="snapshot_request"):
    """Asks for a snapshot at once."""

    epoch: Epoch = 0


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Admission's account of one instance beyond what its snapshot shows."""

    instance: str
    committed_s: Seconds = 0.0
    """Grants that no snapshot lists yet, and leases."""
    committed_blocks: Count = 0
    leases: Count = 0
    grants: Count = 0
    by_model_s: dict[str, float] = {}


class LoadState(Message, frozen=True, kw_only=True, tag="load_state"):
    """The one account of load; on change, at most 20/s."""

    epoch: Epoch
    version: Serial
    instances: tuple[InstanceLoad, ...] = ()


class SlotReport(Message, frozen=True, kw_only=True, tag="slot_report"):
    """A closed slot: phases and switch add up to its wall time."""

    instance: str
    model: str
    n: Count
    round_n: Count
    opened_unix_s: Seconds
    switch_s: Seconds
    active_s: Seconds
    idle_s: Seconds
    """Open without runnable work, waiting for returns."""
    phases: tuple[tuple[str, float], ...] = ()
    """Phase and seconds, in order."""
    switch_path: str = ""
    switch_bytes: Count = 0
    prefilled: Count = 0
    sp_admitted: Count = 0
    sp_parked: Count = 0
    tokens: Count = 0
    paused: Count = 0
    closed_because: str = ""


# --- sessions: queries and the row in the bucket ------------------------------------------------


class SessionParts(msgspec.Struct, frozen=True, kw_only=True):
    """A session's wall time, partitioned (protocols 13); seconds."""

    gateway_s: float = 0.0
    place_s: float = 0.0
    admit_s: float = 0.0
    transfer_s: float = 0.0
    queue_s: float = 0.0
    switch_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    deliver_s: float = 0.0
    tool_gap_s: float = 0.0
    unattributed_s: float = 0.0


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session as its document shows it and as the bucket keeps it."""

    id: str
    tenant: str
    source: SessionSource
    parent: str | None = None
    kind: Literal["root", "child", "fork"] = "root"
    state: Literal["open", "closed"] = "open"
    model: str = ""
    calls: Count = 0
    in_flight: Count = 0
    instance: str | None = None
    epoch: Epoch = 0
    started_unix_s: Seconds = 0.0
    last_unix_s: Seconds = 0.0
    tail: Link | None = None
    usage: Usage = Usage()
    sct_s: Seconds = 0.0
    overlapped_s: Seconds = 0.0
    parts: SessionParts = SessionParts()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why one call of a session was placed where it was."""

    call_id: str
    attempt: Attempt
    call_index: Count
    model: str
    instance: str
    reason: str
    cost: CostTerms | None = None
    runner_up: str | None = None
    runner_up_cost: CostTerms | None = None


class GetSessions(Message, frozen=True, kw_only=True, tag="get_sessions"):
    """List a tenant's sessions, latest first."""

    tenant: str = ""
    limit: Count = 1000


class GetSession(Message, frozen=True, kw_only=True, tag="get_session"):
    """One session with its decisions."""

    tenant: str = ""
    session: str


class EndSession(Message, frozen=True, kw_only=True, tag="end_session"):
    """The session is over: its root span is written, its leases and KV lose protection."""

    tenant: str = ""
    session: str


class SessionList(Message, frozen=True, kw_only=True, tag="session_list"):
    """The sessions asked for; with a single one its decisions, oldest first."""

    sessions: tuple[SessionRow, ...] = ()
    decisions: tuple[Decision, ...] = ()


SessionQuery: TypeAlias = GetSessions | GetSession | EndSession
SessionAnswer: TypeAlias = SessionList | NotGranted


# --- host KV registry: instance <-> kvstore -----------------------------------------------------


class KvEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One aligned KV block held in host memory."""

    prefix: bytes
    """Cumulative block hash, tenant salt and model identity included."""
    parent: bytes = b""
    model: str = ""
    tokens: Count = 0
    """Prefix length up to and including this block."""
    nbytes: Count = 0
    session: str = ""
    """Whose call filled it: the tenant's session, as `subjects.session_key` names it."""


class KvSaved(Message, frozen=True, kw_only=True, tag="kv_saved"):
    """Blocks whose copies are complete. Batched."""

    instance: str
    boot_id: str
    entries: tuple[KvEntry, ...]


class KvDropped(Message, frozen=True, kw_only=True, tag="kv_dropped"):
    """Blocks that are no longer restorable; `all` when an instance has restarted."""

    instance: str
    boot_id: str
    prefixes: tuple[bytes, ...] = ()
    is_all: bool = False


class EvictKv(Message, frozen=True, kw_only=True, tag="evict_kv"):
    """The retention's choice; the instance drops what is not pinned and says so."""

    prefixes: tuple[bytes, ...]


class KvLookup(Message, frozen=True, kw_only=True, tag="kv_lookup"):
    """Longest restorable prefix of a chain of block hashes, per instance."""

    model: str
    prefixes: tuple[bytes, ...]


class KvFound(Message, frozen=True, kw_only=True, tag="kv_found"):
    """Leading blocks of the chain by instance; those with none are left out."""

    blocks_by_instance: dict[str, int]


class KvStats(Message, frozen=True, kw_only=True, tag="kv_stats"):
    """Ask for, and answer with, the registry's totals."""

    backend: str = ""
    entries: Count = 0
    nbytes: Count = 0
    budget_bytes: Count = 0
    evicted: Count = 0
    by_instance: dict[str, int] = {}


KvEvent: TypeAlias = KvSaved | KvDropped
KvQuery: TypeAlias = KvLookup | KvStats


# --- codecs -------------------------------------------------------------------------------------

_encoder: Final = msgspec.msgpack.Encoder()
_json_encoder: Final = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """MessagePack, as on the internal bus."""
    return _encoder.encode(message)


def encode_as(message: Message, encoding: Encoding) -> bytes:
    """MessagePack or JSON, as the reader of an inbox asked."""
    return _json_encoder.encode(message) if encoding == "json" else _encoder.encode(message)


PLACE_CALL: Final = msgspec.msgpack.Decoder(PlaceCall)
ADMIT_CALL: Final = msgspec.msgpack.Decoder(AdmitCall)
PLACE_REPLY: Final = msgspec.msgpack.Decoder(PlaceReply)
INSTANCE_COMMAND: Final = msgspec.msgpack.Decoder(InstanceCommand)
RUN_REPLY: Final = msgspec.msgpack.Decoder(RunReply)
WITHDRAWN: Final = msgspec.msgpack.Decoder(Withdrawn)
CANCEL_CALL: Final = msgspec.msgpack.Decoder(CancelCall)
STREAM: Final = msgspec.msgpack.Decoder(StreamMessage)
PUBLIC: Final = msgspec.json.Decoder(PublicMessage)
NOTICE: Final = msgspec.msgpack.Decoder(Notice)
CALL_ENDED: Final = msgspec.msgpack.Decoder(CallEnded)
CALL_SETTLED: Final = msgspec.msgpack.Decoder(CallSettled)
SNAPSHOT: Final = msgspec.msgpack.Decoder(Snapshot)
SNAPSHOT_REQUEST: Final = msgspec.msgpack.Decoder(SnapshotRequest)
LOAD_STATE: Final = msgspec.msgpack.Decoder(LoadState)
SLOT_REPORT: Final = msgspec.msgpack.Decoder(SlotReport)
SESSION_QUERY: Final = msgspec.msgpack.Decoder(SessionQuery)
SESSION_ANSWER: Final = msgspec.msgpack.Decoder(SessionAnswer)
SESSION_ROW: Final = msgspec.msgpack.Decoder(SessionRow)
KV_EVENT: Final = msgspec.msgpack.Decoder(KvEvent)
EVICT_KV: Final = msgspec.msgpack.Decoder(EvictKv)
KV_QUERY: Final = msgspec.msgpack.Decoder(KvQuery)
KV_FOUND: Final = msgspec.msgpack.Decoder(KvFound)
KV_STATS: Final = msgspec.msgpack.Decoder(KvStats)

T = TypeVar("T")


def decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T | None:
    """The message, or None for bytes that this version cannot read: the caller counts and drops."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError):  # ValidationError (unknown tag, bound) is one
        return None
