"""Names of spans and attributes, in one place.

OpenTelemetry's generative-AI conventions are still in development: pinned by `SCHEMA_URL`, and
only this module knows their spelling. Names from outside never become part of a span's name,
except the model in the gateway's root span, as the conventions ask.
"""

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"

# Spans, one per hop.
GATEWAY_ACCEPT: Final = "gateway.accept"
GATEWAY_STREAM: Final = "gateway.stream"
SCHEDULER_ROUTE: Final = "scheduler.route"
PREFILL_RUN: Final = "prefill.run"
KV_RESTORE: Final = "kv.restore"
KV_RESERVE: Final = "kv.reserve"
KV_TRANSFER: Final = "kv.transfer"
KV_VERIFY: Final = "kv.verify"
KV_PARK: Final = "kv.park"
DECODE_RUN: Final = "decode.run"
ENGINE_STEP: Final = "engine.step"

# Our attributes.
REQUEST_ID: Final = "diptych.request_id"
ATTEMPT: Final = "diptych.attempt"
MODE: Final = "diptych.mode"
LINK: Final = "diptych.kv.link"
LINK_FELL_BACK: Final = "diptych.kv.link_fell_back"
LINK_TLS: Final = "diptych.kv.link_tls"
PREFILL_WORKER: Final = "diptych.prefill_worker"
DECODE_WORKER: Final = "diptych.decode_worker"
TENANT: Final = "diptych.tenant"
QUEUE_MS: Final = "diptych.queue_ms"
KV_PATH: Final = "diptych.kv.path"
PARKING: Final = "diptych.kv.parking"
KV_REFUSED: Final = "diptych.kv.refused"
CODEC: Final = "diptych.kv.codec"
SEALED: Final = "diptych.kv.sealed"
RAW_BYTES: Final = "diptych.kv.raw_bytes"
TRANSFER_BYTES: Final = "diptych.kv.transfer_bytes"
TRANSFER_BLOCKS: Final = "diptych.kv.transfer_blocks"
HELD_BLOCKS: Final = "diptych.kv.held_blocks"
TRANSFER_ID: Final = "diptych.kv.transfer_id"
GB_PER_S: Final = "diptych.kv.gb_per_s"
OVERLAP_FRAC: Final = "diptych.kv.overlap_frac"
REMAINDER_MS: Final = "diptych.kv.remainder_ms"
BATCH_TOKENS: Final = "diptych.engine.batch_tokens"
BATCH_SEQUENCES: Final = "diptych.engine.batch_sequences"
END_REASON: Final = "diptych.end_reason"
ENERGY_J: Final = "diptych.energy_j"
ENERGY_SOURCE: Final = "diptych.energy_source"

# OpenTelemetry, generative AI.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"

PROVIDER_NAME: Final = "diptych"
OPERATION_CHAT: Final = "chat"

# OpenTelemetry, messaging. NATS has no well-known value; a custom one is allowed.
MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_NATS: Final = "nats"
MESSAGING_OPERATION: Final = "messaging.operation.name"
MESSAGING_DESTINATION: Final = "messaging.destination.template"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_CONVERSATION_ID: Final = "messaging.message.conversation_id"
MESSAGING_GROUP: Final = "messaging.consumer.group.name"
