"""What can be set about the llama.cpp engine."""

import os
from dataclasses import dataclass
from pathlib import Path

MAX_SEQUENCES = 191
"""The library's limit of 256 sequence ids, less one for scratch and those of fillers."""
FILLERS = 64
"""Sequence ids that hold free cells (`placement`): about one per sequence that has left lately."""
PREFIX_SEQUENCES = 32
"""Cached prefixes: many tenants' system prompts; ids cost next to nothing."""


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """How one engine uses its machine."""

    library: Path | None = None
    """Shared library to load; default: the one inside the installed `xllamacpp`."""
    threads: int | None = None
    """Threads for batches; default: half the cores, since two workers share a machine."""
    kv_tokens: int = 16_384
    """KV cells for all sequences together (23 kB each for SmolLM2-135M at f16)."""
    max_sequences: int = 16
    context_tokens: int | None = None
    """Longest sequence; default: what the model card says."""
    step_tokens: int = 256
    """Most tokens in one step."""
    embedding_tokens: int = 2048
    """Longest text to make a vector of, at most the context; 0: none is made. Its KV is a context
    of its own (47 MB for SmolLM2-135M), made with the first text."""
    prefix_sequences: int = PREFIX_SEQUENCES
    """Most cached prefixes; 0: none are kept."""
    prefix_tokens: int | None = None
    """Most KV cells for them; default: a quarter. Each thousand makes every token cost 3 to 6 %
    more, since attention skips the cells of others one by one."""

    @property
    def prefix_cells(self) -> int:
        """Most KV cells for cached prefixes."""
        return self.kv_tokens // 4 if self.prefix_tokens is None else self.prefix_tokens

    @property
    def sequence_ids(self) -> int:
        """Sequence ids that hold tokens: the one for scratch and those of fillers follow."""
        return self.max_sequences + self.prefix_sequences

    def thread_count(self) -> int:
        """The number of threads to use."""
        return self.threads or max(1, (os.cpu_count() or 1) // 2)
