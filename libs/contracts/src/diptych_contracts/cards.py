"""What a gateway needs to know of a model, and what two workers must agree on to share its KV."""

from diptych_contracts.wire import Message

GRAMMAR_PARAMETERS = ("response_format", "tool_choice")
PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "logprobs", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "ignore_eos"),
    *GRAMMAR_PARAMETERS,
)
"""What an engine may be unable to obey, as chat completions spell it. `response_format` stands for
grammars that are JSON schemas, `tool_choice` for all others: calls that must be made, or be strict.
"""


class KvLayout(Message, frozen=True, kw_only=True, tag="kv_layout.1"):
    """How KV blocks lie in a transfer slot."""

    layout_id: str
    """`llama-seq-v1`: the engine's own blob of one block."""
    engine_build: str
    """The blob's format belongs to this build, e.g. `llama.cpp-b11549`."""
    block_tokens: int
    slot_bytes: int
    """Size of a full block; the last block of a prompt may be shorter. 0: blocks never pass through
    slots, since the engine moves KV itself, or does not move it."""
    dtype: str

    def blocks(self, tokens: int) -> int:
        """How many slots the KV of `tokens` tokens takes."""
        return -(-tokens // self.block_tokens) if self.slot_bytes else 0


class Fingerprint(Message, frozen=True, kw_only=True, tag="fingerprint.1"):
    """Which weights, exactly enough to decide whether KV may be shared."""

    base: str
    """Hash over architecture, tokenizer, RoPE and KV layout: must match."""
    weights: str
    """Weight precision, e.g. `Q4_1`: must match too, for now (`docs/decisions/0011`)."""


class ModelCard(Message, frozen=True, kw_only=True, tag="model_card.1"):
    """Everything but the weights: a gateway needs no model file."""

    model: str
    """The id clients ask for."""
    fingerprint: Fingerprint
    context_tokens: int
    """Longest prompt plus answer of one request."""
    block_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    add_bos: bool = False
    tokenizer_json: str
    """A `tokenizers` file."""
    chat_template: str
    """The model's own Jinja template."""
    created_unix_s: int = 0
    owner: str = "diptych"
    tool_parser: str = ""
    """How it writes calls of tools (`diptych_text.formats`); empty: as its template says, `none`:
    not at all."""
    reasoning_parser: str = ""
    """How it marks its reasoning, likewise."""
    grammars: bool = False
    """Whether its engine obeys `Sampling.grammar`."""
    embedding_size: int = 0
    """Numbers in the vector of a text; 0: its engine gives none."""
    embedding_tokens: int = 0
    """Longest text it makes a vector of."""
    unsupported: tuple[str, ...] = ()
    """Which of `PARAMETERS` its engine cannot obey: a request that needs one is refused."""
