"""What an engine promises the instance (protocols 8). Pure: types only.

One contract test (tests/integration/test_engine_contract.py) runs against every implementation.

Life of a sequence:

    prepare ──▶ admit ──▶ (restore) ──▶ prefill ──▶ decode ──▶ finished
                  │                        │           │
                  └──────── abort ◀────────┴───────────┘      a slot close pauses it between
                                                              two runs; the next run of its
                                                              model goes on where it stopped

Only `run` and `activate` take engine time; both are awaited, one at a time. `admit`, `abort` and
`wake` may come at any moment from the event loop and take effect at the next decode boundary.
Tokens do not pass the scheduler: they go to the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from talaria_common.wire import CallKey, Endpoint, Residency, ToolDelta

Capability = Literal["exact_quanta", "host_kv", "structured_output", "several_models", "real_text"]
"""exact_quanta: `run` stops after exactly the asked iterations. real_text: output depends on weights."""

FinishReason = Literal["stop", "length", "tool_calls"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it reaches the engine: the caller's JSON body, validated in form by the gateway."""

    key: CallKey
    model: str
    endpoint: Endpoint
    body: dict[str, Any]
    tenant: str = ""
    session: str = ""
    """The tenant's session (`subjects.session_key`): two tenants may use one id."""


class EngineCall(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared call: what the scheduler needs to know, and what only the engine understands."""

    key: CallKey
    model: str
    prompt_tokens: int
    max_tokens: int
    """Most tokens it can generate: the caller's limit, cut to what the context leaves."""
    blocks_needed: int
    """KV blocks of prompt and output together."""
    payload: Any = None
    """The engine's own."""


class Locality(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a prepared call's prompt that need no prefill here, now; device first, then host."""

    device_tokens: int = 0
    host_tokens: int = 0
    """Further tokens, restorable from host memory."""


class Quantum(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one `run`; it returns at the first decode boundary at which one is reached."""

    model: str
    max_decode_iterations: int
    max_prefill_tokens: int
    """Prompt tokens that may be computed in this run; unfinished prefills go on in the next."""
    max_s: float
    """Seconds after which no further iteration starts."""


StopReason = Literal["bound", "finished", "woken", "idle"]
"""bound: a limit was reached. finished: a call ended or was aborted. woken: `wake` was called.
idle: nothing admitted for this model can run."""


class CallProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did for one call."""

    key: CallKey
    new_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed in this run."""
    remaining_prefill: int = 0
    """Prompt tokens still to be computed."""
    finish: FinishReason | None = None
    failed: str | None = None
    """Reason, if the engine had to give this call up."""
    is_aborted: bool = False


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One `run`: the scheduler's only view of it."""

    model: str
    stop: StopReason
    iterations: int = 0
    """Decode iterations."""
    seconds: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    restore_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    restored_tokens: int = 0
    calls: tuple[CallProgress, ...] = ()
    """Calls that advanced, finished, failed or were aborted."""
    blocks_free: int = 0


class SwitchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `activate`, phase by phase; seconds."""

    model: str
    seconds: float
    save_s: float = 0.0
    weights_s: float = 0.0
    shell_s: float = 0.0
    graphs_s: float = 0.0
    publish_s: float = 0.0
    path: str = "h2d"
    """`none` (it was active), `d2d`, `partial` or `h2d`."""
    moved_bytes: int = 0


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model without running it, plus measured times once it has run."""

    model: str
    residency: Residency
    max_model_len: int
    block_tokens: int
    blocks_max: int
    kv_bytes_per_token: int
    weight_bytes: int
    prefill_fixed_s: float
    prefill_token_s: float
    decode_step_s: float
    restore_token_s: float
    switch_s: float
    """From where its weights are now; 0 when active."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """State for the snapshot."""

    engine: str
    device: str
    active: str | None
    models: tuple[ModelFacts, ...]
    blocks_free: int
    blocks_total: int
    host_kv_bytes: int = 0


class KvBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block whose host copy is complete."""

    prefix: bytes
    parent: bytes
    model: str
    tokens: int
    nbytes: int
    session: str
    """Of the call that filled it, as in its EngineRequest."""


class Sink(Protocol):
    """Where an engine's output goes. Called from any thread; returns at once.

    Per call and in this order: `restored` at most once, `first_token` once, `text` any number of
    times, `ended` exactly once (finish, abort or failure), nothing afterwards.
    """

    def restored(self, key: CallKey, seconds: float, tokens: int) -> None:
        """KV of the call's prompt came from the host; `seconds` of engine time."""

    def first_token(self, key: CallKey, cached_tokens: int) -> None:
        """The prefill is done. `cached_tokens` of the prompt were reused from device or host."""

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        """More output; `tokens` it took. Whole characters only."""

    def ended(
        self, key: CallKey, finish: FinishReason | None, failed: str | None, tokens: int
    ) -> None:
        """Last word on a call. `finish` and `failed` are None when it was aborted. `tokens` in all."""

    def kv_saved(self, blocks: Sequence[KvBlock]) -> None:
        """Host copies are complete and may be published."""

    def kv_dropped(self, prefixes: Sequence[bytes]) -> None:
        """Host copies are gone."""


class Engine(Protocol):
    """A model executor that the scheduler drives in quanta."""

    capabilities: frozenset[Capability]

    async def start(self) -> None:
        """Load what must be loaded before the first call; progress goes to the log."""

    async def close(self) -> None:
        """Stop threads and free memory; idempotent. Running calls end as failed."""

    def facts(self) -> EngineFacts:
        """Current state; cheap, from any thread."""

    async def prepare(self, request: EngineRequest) -> EngineCall:
        """Template, tokenise, check exact limits; does not touch the device.

        Raises Rejected: `context_length_exceeded` (both counts in the text), `invalid_request`
        with the param, `unsupported_parameter`, `unknown_model`.
        """

    def locality(self, call: EngineCall) -> Locality:
        """How much of the prompt is reusable now."""

    async def activate(self, model: str) -> SwitchRecord:
        """Make `model` active. Unfinished sequences of the old one keep their KV on the host."""

    def admit(self, calls: Sequence[EngineCall]) -> None:
        """Queue prefills for the next run of their model, in this order."""

    def abort(self, key: CallKey) -> bool:
        """Stop a call at the next boundary, or at once if it is not running; False: unknown."""

    async def run(self, quantum: Quantum) -> StepReport:
        """Prefill and decode admitted calls of the active model within the bounds."""

    def wake(self) -> None:
        """Make the current `run` return at its next decode boundary."""

    def drop_host_kv(self, prefixes: Sequence[bytes]) -> None:
        """Forget host copies that are not in use; `kv_dropped` tells which."""
