"""What the engine is asked: a work's parameters in the engine's words."""

from typing import Any

from diptych_contracts.errors import Permanent
from diptych_engine.over_http.resuming import seed_after
from diptych_engine.port import SequenceWork

MAX_SEED = (1 << 63) - 1


def tokens_of(work: SequenceWork) -> list[int]:
    """What is computed before the first new token: prompt and answer, as one prompt.

    A hand-off was made before the answer's last token, so that one is not part of it.
    """
    answer = work.answer_ids if work.hand_off is None else work.answer_ids[:-1]
    return [*work.prompt_ids, *answer]


def left_of(work: SequenceWork) -> int:
    """How many tokens the engine may give, counted as it counts.

    It counts prefill's token among decode's.
    """
    return work.stopping.max_tokens - answered(work)


def answered(work: SequenceWork) -> int:
    """How many tokens of the answer the engine is given as if they were prompt."""
    return len(work.answer_ids) - (work.hand_off is not None)


def check_obeyed(work: SequenceWork, *, guided: bool) -> None:
    """Refuse what would be ignored.

    Raises:
        Permanent: names the parameter.
    """
    sampling = work.sampling
    if sampling.logit_bias:
        raise Permanent("logit_bias: TensorRT-LLM is not asked to obey it here")
    if (grammar := sampling.grammar) is None:
        return
    if grammar.kind != "json_schema":
        raise Permanent(f"grammar: TensorRT-LLM follows JSON schemas, not {grammar.kind}")
    if not guided:
        raise Permanent("grammar: this engine runs without guided decoding")
    begun = answered(work)
    if begun > 0:  # its grammar would begin anew in the middle of the answer
        raise Permanent(f"grammar: TensorRT-LLM cannot go on after {begun} tokens of the answer")


def sampling_fields(work: SequenceWork, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Fields of `SamplingParams`, but for `guided_decoding`; made anew each time.

    The engine writes into the object it gets. Temperature, `top_k` and `top_p` always stand there:
    with none of them the engine is greedy.
    """
    sampling = work.sampling
    greedy = sampling.temperature == 0
    fields: dict[str, Any] = {
        "end_id": eos_ids[0] if eos_ids else -1,
        "pad_id": eos_ids[0] if eos_ids else 0,
        "max_tokens": left_of(work),
        "n": 1,
        "temperature": sampling.temperature,
        "top_k": 1 if greedy else sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed_after(sampling, answered(work)) & MAX_SEED,
        "ignore_eos": work.stopping.ignore_eos,
        "detokenize": False,
        "add_special_tokens": False,
        "exclude_input_from_output": True,
    }
    if len(eos_ids) > 1 and not work.stopping.ignore_eos:
        fields["stop_token_ids"] = list(eos_ids[1:])
    neutral = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    for name, value in neutral.items():
        if (asked := getattr(sampling, name)) != value:
            fields[name] = asked
    if sampling.top_logprobs is not None:
        fields["logprobs"] = max(1, sampling.top_logprobs)
    return fields
