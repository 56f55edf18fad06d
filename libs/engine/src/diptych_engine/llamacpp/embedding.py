"""Vectors of texts by llama.cpp: a small context of its own on weights that are there already.

It holds KV of one text (23 kB per token for SmolLM2-135M: 47 MB for 2,048) and is made with the
first text, so who embeds nothing pays nothing. Generation's KV is never touched. The library pools
within one physical batch only, so the hidden states of chunks are pooled here.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import Permanent
from diptych_engine.llamacpp.declarations import (
    FLASH_ATTENTION_ON,
    POOLING_NONE,
    TYPE_F16,
)
from diptych_engine.llamacpp.library import Library
from diptych_engine.llamacpp.model import UBATCH_TOKENS

_META_BYTES = 128


class Pooling(IntEnum):
    """How a text's vector comes of its tokens' hidden states, as GGUF files number it."""

    MEAN = 1
    FIRST = 2
    LAST = 3


_UNNAMED = frozenset({"", "-1", "0"})
_KNOWN = _UNNAMED | {str(kind.value) for kind in Pooling}


class LlamaCppEmbedder:
    """An `Embedder`. Used on the engine's thread only."""

    def __init__(self, library: Library, model: Any, *, max_tokens: int, threads: int) -> None:
        self._library = library
        self._ffi, self._lib = library.ffi, library.lib
        self._model = model
        self._threads = threads
        self._context = self._ffi.NULL
        self.size = int(self._lib.llama_model_n_embd_out(model))
        self.max_tokens = max_tokens
        self.chunk_tokens = UBATCH_TOKENS
        self._pooling = pooling(library, model)
        self._pooled = np.zeros(self.size, np.float64)
        self._fed = 0
        self._tokens = self._ffi.new("int32_t[]", UBATCH_TOKENS)

    def begin(self) -> None:
        """Forget the text before. Raises `Permanent` if there is no memory for a context."""
        if self._context == self._ffi.NULL:
            self._context = self._new_context()
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        self._pooled[:] = 0
        self._fed = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Compute the next tokens, at most `chunk_tokens`."""
        count = len(token_ids)
        self._tokens[0:count] = list(token_ids)
        batch = self._lib.llama_batch_get_one(self._tokens, count)
        code = self._lib.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"embedding {count} tokens: {code}: {self._library.last_error()}")
        match self._pooling:
            case Pooling.MEAN:
                for index in range(count):
                    self._pooled += self._state(index)
            case Pooling.FIRST:
                if self._fed == 0:
                    self._pooled[:] = self._state(0)
            case Pooling.LAST:
                self._pooled[:] = self._state(count - 1)
        self._fed += count

    def vector(self) -> NDArray[np.float32]:
        """Of all that was fed, of length 1."""
        length = float(np.linalg.norm(self._pooled))
        return (self._pooled / (length or 1.0)).astype(np.float32)

    def close(self) -> None:
        """Free the context; harmless when repeated."""
        if self._context != self._ffi.NULL:
            self._lib.llama_free(self._context)
        self._context = self._ffi.NULL

    def _state(self, index: int) -> NDArray[np.float32]:
        row = self._lib.llama_get_embeddings_ith(self._context, index)
        if row == self._ffi.NULL:
            raise RuntimeError(f"no hidden state at {index}: {self._library.last_error()}")
        return np.frombuffer(self._ffi.buffer(row, self.size * 4), np.float32)

    def _new_context(self) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = self.max_tokens
        params.n_batch = params.n_ubatch = UBATCH_TOKENS
        params.n_seq_max = 1
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = params.type_v = TYPE_F16
        params.embeddings = True
        params.pooling_type = POOLING_NONE
        context = self._lib.llama_init_from_model(self._model, params)
        if context == self._ffi.NULL:
            reason = self._library.last_error()
            raise Permanent(f"no context to embed {self.max_tokens} tokens: {reason}")
        self._lib.llama_set_n_threads(context, 1, self._threads)
        return context


def gives_vectors(library: Library, model: Any) -> bool:
    """Whether hidden states of this model can be pooled: one that ranks gives scores only."""
    return _named(library, model) in _KNOWN


def pooling(library: Library, model: Any) -> Pooling:
    """What the file names; the mean if it names nothing, or nothing that pools."""
    named = _named(library, model)
    return Pooling(int(named)) if named in _KNOWN - _UNNAMED else Pooling.MEAN


def _named(library: Library, model: Any) -> str:
    architecture = _meta(library, model, "general.architecture")
    return _meta(library, model, f"{architecture}.pooling_type")


def _meta(library: Library, model: Any, key: str) -> str:
    text = library.ffi.new("char[]", _META_BYTES)
    found = library.lib.llama_model_meta_val_str(model, key.encode(), text, _META_BYTES)
    return "" if found < 0 else library.ffi.string(text).decode("utf-8", "replace")
