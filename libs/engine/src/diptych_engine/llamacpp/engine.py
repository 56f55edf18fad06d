"""llama.cpp as a `StepEngine`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import KvLayout, ModelCard
from diptych_contracts.errors import Permanent, Unverified
from diptych_engine.llamacpp.declarations import BUILD
from diptych_engine.llamacpp.library import installed_library, load_library
from diptych_engine.llamacpp.model import LoadedModel
from diptych_engine.llamacpp.self_check import check_decoding
from diptych_engine.llamacpp.settings import MAX_SEQUENCES, LlamaCppSettings
from diptych_engine.port import EngineSpec, KvBlock, StepInput

LAYOUT_ID = "llama-seq-v1"
BLOCK_TOKENS = 64


class LlamaCppEngine:
    """A GGUF model on the CPU, bit-exact under batching, chunking and KV hand-off.

    Raises:
        Permanent: if the model file is missing or wrong, or the settings cannot hold it.
        Incompatible: if library, model and card do not belong together.
    """

    def __init__(self, path: Path, card: ModelCard, settings: LlamaCppSettings) -> None:
        context_tokens = _context_tokens(card, settings)
        library = load_library(settings.library or installed_library())
        self._model = LoadedModel(library, path, vocab_size=card.vocab_size, settings=settings)
        self._ffi, self._lib = self._model.ffi, self._model.lib
        self._scratch = settings.max_sequences
        self._step_tokens = settings.step_tokens
        try:
            # Untouched pages make the first imports ten times slower.
            self._lib.llama_memory_clear(self._model.memory, True)
            check_decoding(self, path, card.vocab_size)
            self._fixed_bytes, self._token_bytes = self._measure_blocks()
        except BaseException:
            self._model.close()
            raise
        self.spec = EngineSpec(
            engine=f"llamacpp-{BUILD}",
            fingerprint=card.fingerprint,
            layout=KvLayout(
                layout_id=LAYOUT_ID,
                engine_build=f"llama.cpp-{BUILD}",
                block_tokens=BLOCK_TOKENS,
                slot_bytes=self._block_bytes(BLOCK_TOKENS),
                dtype="f16",
            ),
            context_tokens=context_tokens,
            kv_tokens=settings.kv_tokens,
            max_sequences=settings.max_sequences,
            vocab_size=card.vocab_size,
            eos_ids=card.eos_ids,
            step_tokens=settings.step_tokens,
        )

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        """Compute one batch; see `port.StepEngine`."""
        model = self._model
        ends: list[int] = []
        start = 0
        for run in inputs:
            end = start + len(run.token_ids)
            if not start < end <= self._step_tokens:
                raise ValueError(f"a step takes 1 to {self._step_tokens} tokens in non-empty runs")
            model.tokens[start:end] = run.token_ids
            model.positions[start:end] = np.arange(run.position, run.position + end - start)
            model.seqs[start:end] = run.seq
            model.wanted[start:end] = 0
            model.wanted[end - 1] = run.want_logits
            ends.append(end)
            start = end
        model.decode(start)
        return [
            model.logits(end - 1) if run.want_logits else None
            for run, end in zip(inputs, ends, strict=True)
        ]

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        """Write the KV of positions [p0, p1) into `out`; gives the number of bytes."""
        if not self._holds(seq, p0, p1):
            raise ValueError(f"sequence {seq} does not hold positions [{p0}, {p1})")
        memory, scratch = self._model.memory, self._scratch
        self._lib.llama_memory_seq_cp(memory, seq, scratch, p0, p1)
        target = self._ffi.from_buffer("uint8_t[]", out, require_writable=True)
        n_bytes: int = self._lib.llama_state_seq_get_data_ext(
            self._model.context, target, len(target), scratch, 0
        )
        self._lib.llama_memory_seq_rm(memory, scratch, -1, -1)
        if n_bytes == 0:
            raise ValueError(f"a block of {p1 - p0} tokens does not fit {len(target)} bytes")
        return n_bytes

    def import_block(self, seq: int, block: KvBlock) -> None:
        """Add `block` to `seq`. Raises `Unverified` if its bytes are not what they should be."""
        n_bytes, expected = block.data.nbytes, self._block_bytes(block.p1 - block.p0)
        where = f"positions [{block.p0}, {block.p1})"
        if n_bytes != expected:
            raise Unverified(f"KV of {where}: expected {expected} bytes, seen {n_bytes}")
        memory, scratch = self._model.memory, self._scratch
        data = self._ffi.from_buffer("uint8_t[]", block.data)
        try:
            # Replaces all of the sequence it goes to: hence by way of scratch.
            taken = self._lib.llama_state_seq_set_data_ext(
                self._model.context, data, n_bytes, scratch, 0
            )
            if taken != n_bytes or not self._holds(scratch, block.p0, block.p1, exactly=True):
                raise Unverified(f"KV of {where}: llama.cpp refused its {n_bytes} bytes")
            self._lib.llama_memory_seq_cp(memory, scratch, seq, block.p0, block.p1)
        finally:
            self._lib.llama_memory_seq_rm(memory, scratch, -1, -1)

    def drop(self, seq: int) -> None:
        """Free all KV of `seq`."""
        self._lib.llama_memory_seq_rm(self._model.memory, seq, -1, -1)

    def close(self) -> None:
        """Free the model; harmless when repeated."""
        self._model.close()

    def _holds(self, seq: int, p0: int, p1: int, *, exactly: bool = False) -> bool:
        first: int = self._lib.llama_memory_seq_pos_min(self._model.memory, seq)
        last: int = self._lib.llama_memory_seq_pos_max(self._model.memory, seq)
        if exactly:
            return (first, last) == (p0, p1 - 1)
        return 0 <= first <= p0 < p1 <= last + 1

    def _block_bytes(self, tokens: int) -> int:
        return self._fixed_bytes + tokens * self._token_bytes

    def _measure_blocks(self) -> tuple[int, int]:
        """Size of a blob, measured: (fixed bytes, bytes per token)."""
        for at in range(0, BLOCK_TOKENS, self._step_tokens):
            part = [0] * min(self._step_tokens, BLOCK_TOKENS - at)
            self.step([StepInput(seq=0, position=at, token_ids=part, want_logits=False)])
        full = self._size_of(0, 0, BLOCK_TOKENS)
        one = self._size_of(0, 0, 1)
        self.drop(0)
        per_token, rest = divmod(full - one, BLOCK_TOKENS - 1)
        if rest:
            raise Permanent(f"KV blobs of {full} and {one} bytes do not grow evenly with tokens")
        return one - per_token, per_token

    def _size_of(self, seq: int, p0: int, p1: int) -> int:
        self._lib.llama_memory_seq_cp(self._model.memory, seq, self._scratch, p0, p1)
        size: int = self._lib.llama_state_seq_get_size_ext(self._model.context, self._scratch, 0)
        self._lib.llama_memory_seq_rm(self._model.memory, self._scratch, -1, -1)
        return size


def _context_tokens(card: ModelCard, settings: LlamaCppSettings) -> int:
    if not 1 <= settings.max_sequences <= MAX_SEQUENCES:
        raise Permanent(f"max_sequences must be 1 to {MAX_SEQUENCES}, is {settings.max_sequences}")
    if settings.step_tokens < settings.max_sequences + 1:
        raise Permanent(
            f"step_tokens={settings.step_tokens} must exceed max_sequences={settings.max_sequences}"
        )
    context_tokens = settings.context_tokens or card.context_tokens
    if context_tokens > settings.kv_tokens:
        raise Permanent(
            f"kv_tokens={settings.kv_tokens} cannot hold one sequence of {context_tokens} tokens; "
            "raise kv_tokens or lower context_tokens"
        )
    return context_tokens
