"""llama.cpp, embedded by cffi: the default engine."""

from diptych_engine.llamacpp.engine import BLOCK_TOKENS, LAYOUT_ID, LlamaCppEngine
from diptych_engine.llamacpp.settings import LlamaCppSettings

__all__ = ["BLOCK_TOKENS", "LAYOUT_ID", "LlamaCppEngine", "LlamaCppSettings"]
