"""Parameters that vLLM and SGLang call by one name."""

from typing import Any

from diptych_engine.over_http.resuming import seed_after, signed
from diptych_engine.port import SequenceWork


def sampling_fields(work: SequenceWork, eos_ids: tuple[int, ...], *, seed: str) -> dict[str, Any]:
    """How tokens are drawn, and which ones end the answer.

    Args:
        work: What is asked.
        eos_ids: Tokens that end an answer.
        seed: What the engine calls the seed.
    """
    sampling = work.sampling
    asked: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": work.stopping.ignore_eos,
    }
    if sampling.temperature > 0:
        asked[seed] = signed(seed_after(sampling, len(work.answer_ids)))
    if not work.stopping.ignore_eos:
        asked["stop_token_ids"] = list(eos_ids)
    if sampling.logit_bias:
        asked["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return asked
