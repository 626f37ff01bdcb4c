"""Names of span attributes, in one place. Pure.

OpenTelemetry's GenAI names where they exist (conventions v0.1.0, in development: a
rename there is one line here), `talaria.*` for what only Talaria has.
"""

from __future__ import annotations

from typing import Final

# --- GenAI conventions --------------------------------------------------------------------------

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
CONVERSATION: Final = "gen_ai.conversation.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
ERROR_TYPE: Final = "error.type"

# --- who and which ------------------------------------------------------------------------------

SESSION_SOURCE: Final = "talaria.session.source"
SESSION_PARENT: Final = "talaria.session.parent"
SESSION_CALLS: Final = "talaria.session.calls"
SESSION_END: Final = "talaria.session.end"
CALL: Final = "talaria.call.id"
CALL_INDEX: Final = "talaria.call.index"
ATTEMPT: Final = "talaria.call.attempt"
ATTEMPTS: Final = "talaria.call.attempts"
OUTCOME: Final = "talaria.call.outcome"
IS_CONTINUATION: Final = "talaria.call.is_continuation"
INSTANCE: Final = "talaria.instance"
BOOT: Final = "talaria.instance.boot_id"

# --- placing ------------------------------------------------------------------------------------

REASON: Final = "talaria.place.reason"
COST_S: Final = "talaria.place.cost_s"
COST_LOAD_S: Final = "talaria.place.cost.load_s"
COST_KV_S: Final = "talaria.place.cost.kv_s"
COST_ACTIVATE_S: Final = "talaria.place.cost.activate_s"
RUNNER_UP: Final = "talaria.place.runner_up"
RUNNER_UP_COST_S: Final = "talaria.place.runner_up.cost_s"
CANDIDATES: Final = "talaria.place.candidates"
EXCLUDED: Final = "talaria.place.excluded"
EPOCH: Final = "talaria.admission.epoch"
GRANT: Final = "talaria.admission.grant"
LEASE_OF: Final = "talaria.admission.lease_of"
CHARGE_S: Final = "talaria.admission.charge_s"

# --- running ------------------------------------------------------------------------------------

RESTORED_TOKENS: Final = "talaria.restore.tokens"
SAVED_BYTES: Final = "talaria.kv_save.bytes"

# --- session completion time --------------------------------------------------------------------

SCT_S: Final = "talaria.sct_s"
TOOL_GAP_S: Final = "talaria.tool_gap_s"
OVERLAPPED_S: Final = "talaria.overlapped_s"
UNATTRIBUTED_S: Final = "talaria.unattributed_s"
