"""Requests and answers of the C++ backend's model: token ids, and KV that it hands over itself.

A context-only request answers once, with `context_phase_params`: bytes that are copied unchanged
into the generation-only request, all whose other inputs are the same. The generation begins with
the token that the context already gave.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from diptych_contracts.errors import Permanent, Refused, Unverified
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling
from diptych_engine.port import SequenceWork
from diptych_engine.request_port import TokenDelta
from diptych_engine.triton.served import INFLIGHT_INPUTS, Served
from diptych_engine.triton.tensors import Inputs, array_of, outputs

BOTH, CONTEXT, GENERATION = "context_and_generation", "context_only", "generation_only"
PARAMS = "context_phase_params"
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_SEEDS = 1 << 64


class Opaque(NamedTuple):
    """What a hand-off's opaque bytes hold."""

    input_tokens: int
    """How many tokens the context request had: the generation's must be the same ones."""
    params: bytes
    """The context's reply, unchanged."""

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(tuple(self))

    @classmethod
    def decode(cls, data: bytes) -> "Opaque":
        """Back from bytes. Raises `Unverified`."""
        try:
            return cls(*msgspec.msgpack.decode(data, type=tuple[int, bytes]))
        except msgspec.DecodeError as err:
            raise Unverified(f"a hand-off that is none of triton's: {err}") from err


class Question(NamedTuple):
    """What a request asks of the model."""

    kind: str
    tokens: Sequence[int]
    """The input."""
    given: Sequence[int]
    """Answer tokens that come first and are known: they must be these, and are not told again."""
    left: int
    """How many new ones may come."""
    params: bytes | None = None


def question(work: SequenceWork) -> Question:
    """The request for a whole answer, or for what is left of a handed-over one.

    Raises:
        Unverified: a hand-off of other tokens.
    """
    tokens = [*work.prompt_ids, *work.answer_ids]
    left = work.stopping.max_tokens - len(work.answer_ids)
    if work.hand_off is None:
        return Question(BOTH, tokens, (), left)
    opaque = Opaque.decode(work.hand_off.opaque)
    if not 0 < opaque.input_tokens <= len(tokens):
        raise Unverified(
            f"a hand-off of {opaque.input_tokens} tokens for a sequence of {len(tokens)}"
        )
    given = tokens[opaque.input_tokens :]
    return Question(GENERATION, tokens[: opaque.input_tokens], given, left, opaque.params)


def request(
    served: Served, asked: Question, work: SequenceWork, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """The request, as `stream_infer` takes it, but for its id."""
    inputs = Inputs(INFLIGHT_INPUTS, batched=served.batched)
    inputs.add("input_ids", asked.tokens)
    inputs.add("input_lengths", [len(asked.tokens)])
    inputs.add("request_output_len", [len(asked.given) + asked.left])
    inputs.add("streaming", [True])
    inputs.add("exclude_input_in_output", [True])
    if eos_ids and not work.stopping.ignore_eos:
        _end_at(inputs, eos_ids)
    _sample(inputs, work.sampling, len(work.answer_ids) - len(asked.given))
    if work.sampling.grammar is not None:
        _guide(inputs, served, work.sampling.grammar)
    if asked.params is not None:
        inputs.add(PARAMS, np.frombuffer(asked.params, np.uint8))
    wanted = ["output_ids", "sequence_length", *([PARAMS] if asked.kind == CONTEXT else [])]
    return {
        "model_name": served.name,
        "inputs": inputs.made,
        "outputs": outputs(wanted),
        "parameters": {"request_type": asked.kind},
    }


def stop_request(served: Served) -> dict[str, Any]:
    """What ends the request that has the same id."""
    inputs = Inputs(INFLIGHT_INPUTS, batched=served.batched)
    for name in ("input_ids", "input_lengths", "request_output_len"):
        inputs.add(name, [1])  # required, and not looked at
    inputs.add("stop", [True])
    return {"model_name": served.name, "inputs": inputs.made}


def _end_at(inputs: Inputs, eos_ids: Sequence[int]) -> None:
    inputs.add("end_id", [eos_ids[0]])
    inputs.add("pad_id", [eos_ids[0]])
    if others := list(eos_ids[1:]):  # there is one end_id only: the others are words of one token
        inputs.add("stop_words_list", [others, list(range(1, len(others) + 1))])


def _sample(inputs: Inputs, sampling: Sampling, answered: int) -> None:
    if sampling.temperature == 0:
        inputs.add("runtime_top_k", [1])
    else:
        inputs.add("temperature", [sampling.temperature])
        inputs.add("runtime_top_k", [sampling.top_k])
        inputs.add("runtime_top_p", [sampling.top_p])
    inputs.add("seed", [seed_at(sampling.seed, answered)])
    if sampling.presence_penalty:
        inputs.add("presence_penalty", [sampling.presence_penalty])
    if sampling.frequency_penalty:
        inputs.add("frequency_penalty", [sampling.frequency_penalty])
    if sampling.repetition_penalty != 1:
        inputs.add("repetition_penalty", [sampling.repetition_penalty])


def seed_at(seed: int, answered: int) -> int:
    """The seed for an answer that goes on after `answered` tokens.

    Another one each time: the engine begins its random numbers anew with every request.
    """
    return (seed + answered * _SEED_STEP) % _SEEDS


def _guide(inputs: Inputs, served: Served, grammar: Grammar) -> None:
    if grammar.kind != "json_schema" or not served.guided:
        raise Permanent(f"model {served.name!r} obeys no grammar of kind {grammar.kind}")
    inputs.add("guided_decoding_guide_type", [b"json_schema"])
    inputs.add("guided_decoding_guide", [grammar.text.encode()])


def new_tokens(result: Any) -> list[int]:
    """The tokens of one response: never cumulative where `streaming` is set."""
    ids, lengths = array_of(result, "output_ids"), array_of(result, "sequence_length")
    if ids is None or not ids.size:
        return []
    first = ids.reshape(-1, ids.shape[-1])[0]  # beam 0
    if lengths is not None and lengths.size:
        first = first[: int(lengths.reshape(-1)[0])]
    return [int(token) for token in first if token >= 0]  # -1 is padding


def params_of(result: Any) -> bytes | None:
    """The bytes of a context's reply."""
    found = array_of(result, PARAMS)
    return None if found is None or not found.size else found.tobytes()


class Cursor:
    """Makes deltas of an answer's tokens: known ones are checked, the end is cut off."""

    def __init__(self, asked: Question, stops: Sequence[int]) -> None:
        self._given = list(asked.given)
        self._left = asked.left
        self._stops = frozenset(stops)
        self.finished = False

    def take(self, tokens: Sequence[int]) -> TokenDelta | None:
        """What is new in them.

        Raises:
            Refused: the generation does not begin with what the context gave.
        """
        told: list[int] = []
        finish: EndReason | None = None
        for token in tokens:
            if self._given:
                if token != (known := self._given.pop(0)):
                    raise Refused(
                        RefusalReason.UNVERIFIED_KV,
                        f"the generation began with token {token}, the context with {known}",
                    )
                continue
            if token in self._stops:
                finish = EndReason.STOP
                break
            told.append(token)
            if len(told) == self._left:
                finish = EndReason.LENGTH
                break
        self._left -= len(told)
        self.finished = finish is not None
        return TokenDelta(tuple(told), finish) if told or finish else None

    def end(self) -> TokenDelta:
        """The model said no more: its end token is not among what it tells."""
        if self._given:
            raise Refused(RefusalReason.UNVERIFIED_KV, "the generation lacks the context's token")
        self.finished = True
        return TokenDelta((), EndReason.STOP)
