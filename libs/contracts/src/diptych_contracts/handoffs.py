"""Hand-offs whose KV an engine moves itself (TensorRT-LLM, Triton, vLLM, SGLang).

Such an engine's own transceiver carries the KV from one worker's memory to the other's; what
travels here is its description, which only the same engine in the same version can read.
"""

from enum import StrEnum

from diptych_contracts.wire import Message

LINK = "engine"
"""What such a hand-off names where others name a KV link."""
MAX_OPAQUE_BYTES = 1024 * 1024
"""Of a hand-off's description: some kB as a rule (vLLM names each block of the prompt in it)."""


class FirstToken(StrEnum):
    """Whose first token counts."""

    PREFILL = "prefill"
    """Prefill samples it; decode goes on after it (TensorRT-LLM)."""
    DECODE = "decode"
    """Prefill's is thrown away, and decode samples it again (vLLM, SGLang)."""


class HandOffTerms(Message, frozen=True, kw_only=True, tag="hand_off_terms.1"):
    """How an engine hands over. Two workers pair if theirs are equal."""

    kind: str
    """`trtllm`, `triton_trtllm`, `vllm_nixl` or `sglang_pd`."""
    engine_version: str
    """Both sides must run the same one."""
    first_token: FirstToken
    pair_up_front: bool = False
    """Whether decode must be asked before prefill computes: both legs meet in the middle."""
    orphan_ms: int = 0
    """After so long prefill's KV that nobody fetched is free again; 0: with the attempt."""


class EngineHandOff(Message, frozen=True, kw_only=True, tag="engine_hand_off.1"):
    """What decode needs in order to fetch the KV of one attempt. A secret: never logged."""

    terms: HandOffTerms
    opaque: bytes
    """The engine's own description; only its adapter reads it. At most `MAX_OPAQUE_BYTES`."""

    def __repr__(self) -> str:
        return f"EngineHandOff({self.terms.kind}, {len(self.opaque)} bytes)"
