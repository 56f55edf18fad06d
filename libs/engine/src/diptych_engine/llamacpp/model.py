"""A loaded model with its context: thin calls, each with its errors translated."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import Incompatible, Permanent
from diptych_engine.llamacpp.declarations import FLASH_ATTENTION_ON, TYPE_F16
from diptych_engine.llamacpp.library import Library
from diptych_engine.llamacpp.settings import FILLERS, LlamaCppSettings

UBATCH_TOKENS = 32
"""From 64 query rows on, attention takes a kernel whose result depends on the chunking."""
SPARE_CELLS = 64
"""One block on its way in."""


def _load(library: Library, path: Path) -> Any:
    if not path.is_file():
        raise Permanent(f"no model file at {path}")
    library.last_error()
    params = library.lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = library.lib.llama_model_load_from_file(str(path).encode(), params)
    if model == library.ffi.NULL:
        raise Permanent(f"{path} is not a model llama.cpp can load: {library.last_error()}")
    return model


def _check(library: Library, path: Path, model: Any, vocab_size: int) -> None:
    lib = library.lib
    if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model):
        raise Permanent(f"{path} is a recurrent model: it has no KV per token to hand over")
    if lib.llama_model_has_encoder(model):
        raise Permanent(f"{path} has an encoder: only decoder models are served")
    seen = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    if seen != vocab_size:
        raise Incompatible(f"vocab_size: the model card says {vocab_size}, {path} has {seen}")


class LoadedModel:
    """Weights and KV memory. Used from one thread.

    Everything that decides whether results are bit-equal, whatever else is in the batch, is set
    here: one unified KV cache at f16, flash attention, small physical batches, and one thread for
    a batch of one token (with more, a long lone query is split and sums in another order).

    Raises:
        Permanent: if the file cannot be loaded, or is no decoder with KV per token.
        Incompatible: if the vocabulary is not `vocab_size` tokens.
    """

    def __init__(
        self, library: Library, path: Path, *, vocab_size: int, settings: LlamaCppSettings
    ) -> None:
        self._library = library
        self.ffi, self.lib = library.ffi, library.lib
        self._vocab_size = vocab_size
        self._model = _load(library, path)
        self.context = self.ffi.NULL
        try:
            _check(library, path, self._model, vocab_size)
            self.context = self._new_context(path, settings)
        except BaseException:
            self.close()
            raise
        self.memory = self.lib.llama_get_memory(self.context)
        self._allocate_batch(settings.step_tokens)

    def _new_context(self, path: Path, settings: LlamaCppSettings) -> Any:
        params = self.lib.llama_context_default_params()
        params.n_ctx = settings.kv_tokens + SPARE_CELLS
        params.n_batch = settings.step_tokens
        params.n_ubatch = UBATCH_TOKENS
        params.n_seq_max = settings.sequence_ids + 1 + FILLERS
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = params.type_v = TYPE_F16
        params.kv_unified = True
        context = self.lib.llama_init_from_model(self._model, params)
        if context == self.ffi.NULL:
            raise Permanent(
                f"no context for {path} with {settings.kv_tokens} KV tokens: "
                f"{self._library.last_error()}"
            )
        self.lib.llama_set_n_threads(context, 1, settings.thread_count())
        return context

    def _allocate_batch(self, size: int) -> None:
        self.tokens = np.zeros(size, np.int32)
        self.positions = np.zeros(size, np.int32)
        self.seqs = np.zeros(size, np.int32)
        self.wanted = np.zeros(size, np.int8)
        self._ones = np.ones(size, np.int32)
        first = self._pointer("int32_t *", self.seqs)
        self._seq_pointers = self.ffi.new("int32_t *[]", [first + i for i in range(size)])
        batch = self.ffi.new("struct llama_batch *")
        batch.token = self._pointer("int32_t *", self.tokens)
        batch.pos = self._pointer("int32_t *", self.positions)
        batch.n_seq_id = self._pointer("int32_t *", self._ones)
        batch.seq_id = self._seq_pointers
        batch.logits = self._pointer("int8_t *", self.wanted)
        self._batch = batch

    def _pointer(self, kind: str, array: NDArray[Any]) -> Any:
        return self.ffi.cast(kind, array.ctypes.data)

    def decode(self, n_tokens: int) -> None:
        """Compute the first `n_tokens` entries of `tokens`, `positions`, `seqs` and `wanted`.

        Raises:
            RuntimeError: if the library refuses, which correct bookkeeping rules out.
        """
        self._batch.n_tokens = n_tokens
        code = self.lib.llama_decode(self.context, self._batch[0])
        if code != 0:
            what = "no room in the KV cache" if code == 1 else self._library.last_error()
            raise RuntimeError(f"llama_decode of {n_tokens} tokens gave {code}: {what}")

    @property
    def sliding_window(self) -> int:
        """Tokens of the sliding window that some layers attend to; 0: none does."""
        return int(self.lib.llama_model_n_swa(self._model))

    def logits(self, index: int) -> NDArray[np.float32]:
        """A view of the logits `[vocab]` after batch entry `index`, valid until the next call."""
        row = self.lib.llama_get_logits_ith(self.context, index)
        if row == self.ffi.NULL:
            raise RuntimeError(f"no logits at batch entry {index}: {self._library.last_error()}")
        return np.frombuffer(self.ffi.buffer(row, self._vocab_size * 4), np.float32)

    @property
    def weights(self) -> Any:
        """For further contexts; they must be freed before it."""
        return self._model

    def close(self) -> None:
        """Free context and weights; harmless when repeated."""
        if self.context != self.ffi.NULL:
            self.lib.llama_free(self.context)
        if self._model != self.ffi.NULL:
            self.lib.llama_model_free(self._model)
        self.context = self._model = self.ffi.NULL
