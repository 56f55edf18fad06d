"""Makes both forms of the engine from a worker's settings: what `adapters.ADAPTERS` names."""

from pathlib import Path

from diptych_contracts.errors import Permanent
from diptych_engine.adapters import AdapterSettings
from diptych_engine.tensorrt_llm.engine import Served, TrtLlmEngine
from diptych_engine.tensorrt_llm.options import LlmOptions


def llm_api(settings: AdapterSettings) -> TrtLlmEngine:
    """The engine inside the worker. Raises `Permanent` with one clear line."""
    options = settings.options_as(LlmOptions)
    path = "" if settings.model_path == Path() else str(settings.model_path)
    if not (checkpoint := options.checkpoint or path):
        raise Permanent("no weights: set MODEL_PATH or the option 'checkpoint'")
    served = Served(
        checkpoint=checkpoint,
        fingerprint=settings.fingerprint(dtype=options.kv_dtype),
        role=settings.role,
        context_tokens=settings.card.context_tokens,
        vocab_size=settings.card.vocab_size,
        eos_ids=settings.card.eos_ids,
        max_sequences=settings.max_sequences,
        kv_tokens=settings.kv_tokens,
    )
    return TrtLlmEngine(served, options)
