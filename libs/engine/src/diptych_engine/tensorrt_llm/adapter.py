"""Makes both forms of the engine from a worker's settings: what `adapters.ADAPTERS` names."""

from pathlib import Path

from diptych_contracts.errors import Permanent
from diptych_engine.adapters import AdapterSettings
from diptych_engine.request_port import RequestEngine
from diptych_engine.tensorrt_llm.engine import TrtLlmEngine
from diptych_engine.tensorrt_llm.options import LlmOptions, ServeOptions
from diptych_engine.tensorrt_llm.served import Served


def llm_api(settings: AdapterSettings) -> TrtLlmEngine:
    """The engine inside the worker. Raises `Permanent` with one clear line."""
    options = settings.options_as(LlmOptions)
    path = "" if settings.model_path == Path() else str(settings.model_path)
    if not (checkpoint := options.checkpoint or path):
        raise Permanent("no weights: set MODEL_PATH or the option 'checkpoint'")
    return TrtLlmEngine(_served(settings, checkpoint, options.kv_dtype), options)


def behind_http(settings: AdapterSettings) -> RequestEngine:
    """The engine behind `trtllm-serve`. Raises `Permanent` with one clear line."""
    from diptych_engine.tensorrt_llm.serve import TrtLlmServe  # it wants httpx

    options = settings.options_as(ServeOptions)
    if not settings.url:
        raise Permanent("no server: set ENGINE_URL to where trtllm-serve listens")
    served = _served(settings, settings.engine_model, options.kv_dtype)
    return TrtLlmServe(served, options, url=settings.url)


def _served(settings: AdapterSettings, checkpoint: str, dtype: str) -> Served:
    return Served(
        checkpoint=checkpoint,
        fingerprint=settings.fingerprint(dtype=dtype),
        role=settings.role,
        context_tokens=settings.card.context_tokens,
        vocab_size=settings.card.vocab_size,
        eos_ids=settings.card.eos_ids,
        max_sequences=settings.max_sequences,
        kv_tokens=settings.kv_tokens,
    )
