"""What a TensorRT-LLM serves, in whichever form it runs."""

from dataclasses import dataclass

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import FirstToken, HandOffTerms
from diptych_engine.port import EngineSpec
from diptych_engine.tensorrt_llm.options import KvOptions

GUIDED = ("response_format",)
"""What needs guided decoding. Other grammars than JSON schemas it does not know in our form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Which model the engine serves, and for whom."""

    checkpoint: str
    fingerprint: Fingerprint
    role: Role
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_sequences: int
    kv_tokens: int = 0
    """Of all sequences together; 0: what the GPU's memory holds, counted as `max_sequences` full
    contexts."""

    def spec(
        self, engine: str, options: KvOptions, *, moves_as: str, unsupported: tuple[str, ...]
    ) -> EngineSpec:
        """What a worker tells of it.

        Args:
            engine: Form and version.
            options: How it was started.
            moves_as: What must be equal, besides dtype and blocks, where KV is handed over.
            unsupported: See `EngineSpec`.
        """
        dtype, block_tokens = options.kv_dtype, options.tokens_per_block
        return EngineSpec(
            engine=engine,
            fingerprint=self.fingerprint,
            layout=KvLayout(
                layout_id="engine",
                engine_build=engine,
                block_tokens=block_tokens,
                slot_bytes=0,
                dtype=dtype,
            ),
            context_tokens=self.context_tokens,
            kv_tokens=self.kv_tokens or self.context_tokens * self.max_sequences,
            max_sequences=self.max_sequences,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
            hand_off=HandOffTerms(
                kind="trtllm",
                engine_version=f"{moves_as}/{dtype}/{block_tokens}",
                first_token=FirstToken.PREFILL,
                orphan_ms=options.kv_transfer_timeout_ms,
            ),
            unsupported=unsupported,
        )
