"""llama.cpp as a `StepEngine`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import KvLayout, ModelCard
from diptych_contracts.errors import Incompatible, Permanent, Unverified
from diptych_engine.llamacpp.declarations import BUILD
from diptych_engine.llamacpp.embedding import LlamaCppEmbedder, gives_vectors
from diptych_engine.llamacpp.kv_cells import KvCells, ascending
from diptych_engine.llamacpp.library import Library, installed_library, load_library
from diptych_engine.llamacpp.model import LoadedModel
from diptych_engine.llamacpp.placement import Span, Want
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
        self._cells = KvCells(self._model, settings)
        self._step_tokens = settings.step_tokens
        self.embedder = _embedder(library, self._model, settings, context_tokens)
        try:
            # Untouched pages make the first imports ten times slower.
            self._model.lib.llama_memory_clear(self._model.memory, True)
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
            # Under a sliding window cells behind it may be given to others, so a path could not
            # be forked at an earlier block.
            prefix_sequences=0 if self._model.sliding_window else settings.prefix_sequences,
            prefix_tokens=settings.prefix_cells,
            embedding_size=self.embedder.size if self.embedder else 0,
            embedding_tokens=self.embedder.max_tokens if self.embedder else 0,
        )

    @property
    def draft_tokens(self) -> int:
        """None: it does not draft."""
        return 0

    def accepted_drafts(self, seq: int) -> int:
        """None, of none."""
        return 0

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        """Compute one batch; see `port.StepEngine`."""
        n_tokens = sum(len(run.token_ids) for run in inputs)
        if not all(run.token_ids for run in inputs) or not 0 < n_tokens <= self._step_tokens:
            raise ValueError(f"a step takes 1 to {self._step_tokens} tokens in non-empty runs")
        for run in inputs:
            if run.position != self._cells.length(run.seq):
                raise ValueError(
                    f"sequence {run.seq}: expected position {self._cells.length(run.seq)}, "
                    f"got {run.position}"
                )
        cells = self._cells.place([Want(run.seq, len(run.token_ids)) for run in inputs])
        ends = self._fill_batch(inputs, np.concatenate(cells))
        self._model.decode(n_tokens)
        return [
            self._model.logits(end) if run.want_logits else None
            for run, end in zip(inputs, ends, strict=True)
        ]

    def _fill_batch(self, inputs: Sequence[StepInput], cells: NDArray[np.int64]) -> list[int]:
        """Write the batch in the order of `cells`; gives where each run's last token stands."""
        model, at = self._model, 0
        place = np.empty(len(cells), np.int64)
        place[np.argsort(cells)] = np.arange(len(cells))
        model.wanted[: len(cells)] = 0
        ends: list[int] = []
        for run in inputs:
            count = len(run.token_ids)
            to = place[at : at + count]
            model.tokens[to] = run.token_ids
            model.positions[to] = np.arange(run.position, run.position + count)
            model.seqs[to] = run.seq
            model.wanted[to[-1]] = run.want_logits
            ends.append(int(to[-1]))
            at += count
        return ends

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        """Write the KV of positions [p0, p1) into `out`; gives the number of bytes."""
        if not 0 <= p0 < p1 <= self._cells.length(seq):
            raise ValueError(f"sequence {seq} does not hold positions [{p0}, {p1})")
        n_bytes = self._cells.read(Span(seq, p0, p1), out)
        if n_bytes == 0:
            raise ValueError(f"a block of {p1 - p0} tokens does not fit {len(out)} bytes")
        return n_bytes

    def import_block(self, seq: int, block: KvBlock) -> None:
        """Add `block` to `seq`. Raises `Unverified` if its bytes are not what they should be."""
        n_bytes, expected = block.data.nbytes, self._block_bytes(block.p1 - block.p0)
        where = f"positions [{block.p0}, {block.p1})"
        if n_bytes != expected:
            raise Unverified(f"KV of {where}: expected {expected} bytes, seen {n_bytes}")
        if block.p0 != self._cells.length(seq):
            raise Unverified(f"KV of {where} does not follow {self._cells.length(seq)} tokens")
        if not self._cells.write(Span(seq, block.p0, block.p1), block.data):
            raise Unverified(f"KV of {where}: llama.cpp refused its {n_bytes} bytes")

    def fork(self, src_seq: int, dst_seq: int, p0: int, p1: int) -> bool:
        """Let `dst_seq` share cells with `src_seq`; see `port.StepEngine`."""
        if not 0 <= p0 < p1 <= self._cells.length(src_seq):
            raise ValueError(f"sequence {src_seq} does not hold positions [{p0}, {p1})")
        if (end := self._cells.length(dst_seq)) != p0:
            raise ValueError(f"sequence {dst_seq} ends at {end}, expected {p0}")
        return self._cells.share(Span(src_seq, p0, p1), dst_seq)

    def drop(self, seq: int) -> None:
        """Free all KV of `seq` that no other sequence shares."""
        self._cells.drop(seq)

    def close(self) -> None:
        """Free the model; harmless when repeated."""
        if self.embedder is not None:
            self.embedder.close()
        self._model.close()

    def _block_bytes(self, tokens: int) -> int:
        return self._fixed_bytes + tokens * self._token_bytes

    def _measure_blocks(self) -> tuple[int, int]:
        """Size of a blob, measured: (fixed bytes, bytes per token)."""
        for at in range(0, BLOCK_TOKENS, self._step_tokens):
            part = [0] * min(self._step_tokens, BLOCK_TOKENS - at)
            self.step([StepInput(seq=0, position=at, token_ids=part, want_logits=False)])
        span = Span(0, 0, BLOCK_TOKENS)
        full, one = self._cells.read_size(span), self._cells.read_size(Span(0, 0, 1))
        blob = memoryview(bytearray(full))
        if self._cells.read(span, blob) != full or not ascending(blob, span):
            raise Incompatible("a KV blob does not list its cells as expected of this build")
        self.drop(0)
        per_token, rest = divmod(full - one, BLOCK_TOKENS - 1)
        if rest:
            raise Permanent(f"KV blobs of {full} and {one} bytes do not grow evenly with tokens")
        return one - per_token, per_token


def _embedder(
    library: Library, model: LoadedModel, settings: LlamaCppSettings, context_tokens: int
) -> LlamaCppEmbedder | None:
    """What makes vectors of texts; None: it is not wanted, or the model only ranks."""
    max_tokens = min(settings.embedding_tokens, context_tokens)
    if max_tokens < 1 or not gives_vectors(library, model.weights):
        return None
    return LlamaCppEmbedder(
        library, model.weights, max_tokens=max_tokens, threads=settings.thread_count()
    )


def _context_tokens(card: ModelCard, settings: LlamaCppSettings) -> int:
    if settings.max_sequences < 1 or settings.prefix_sequences < 0:
        raise Permanent("max_sequences must be at least 1, prefix_sequences at least 0")
    if settings.sequence_ids > MAX_SEQUENCES:
        raise Permanent(
            f"max_sequences={settings.max_sequences} and prefix_sequences="
            f"{settings.prefix_sequences} exceed the library's {MAX_SEQUENCES} sequence ids"
        )
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
