"""Requests and answers of the LLM API's model: one text in, the whole text so far out.

Tokens are made of it with the model's tokenizer. An answer's are those of its pieces, so they may
be more than the engine counted, or fewer; its text is the same.
"""

from collections.abc import Sequence
from typing import Any

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import Refused
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling
from diptych_engine.port import SequenceWork
from diptych_engine.request_port import TokenDelta
from diptych_engine.triton.failures import FAILED
from diptych_engine.triton.inflight import seed_at
from diptych_engine.triton.served import LLM_API_INPUTS, Served
from diptych_engine.triton.tensors import Inputs, outputs, text_of
from diptych_text.codec import TextCodec

_UNFINISHED = "\ufffd"
_RUNNING = ("None", "")
"""What `finish_reason` is while an answer goes on: Python's word."""


def request(served: Served, work: SequenceWork, text: str) -> dict[str, Any]:
    """The request, as `stream_infer` takes it, but for its id."""
    inputs = Inputs(LLM_API_INPUTS, batched=served.batched)
    inputs.add("text_input", [text.encode()])
    inputs.add("streaming", [True])
    answered = len(work.answer_ids)
    inputs.add("sampling_param_max_tokens", [work.stopping.max_tokens - answered])
    inputs.add("sampling_param_exclude_input_from_output", [True])
    inputs.add("return_finish_reason", [True])
    _sample(inputs, work.sampling, answered)
    return {
        "model_name": served.name,
        "inputs": inputs.made,
        "outputs": outputs(["text_output", "finish_reason"]),
    }


def stop_request(served: Served) -> dict[str, Any]:
    """What ends the request that has the same id; it is answered by an error itself."""
    inputs = Inputs(LLM_API_INPUTS, batched=served.batched)
    inputs.add("text_input", [b" "])
    inputs.add("stop", [True])
    return {"model_name": served.name, "inputs": inputs.made}


def _sample(inputs: Inputs, sampling: Sampling, answered: int) -> None:
    if sampling.temperature == 0:
        inputs.add("sampling_param_top_k", [1])
    else:
        inputs.add("sampling_param_temperature", [sampling.temperature])
        inputs.add("sampling_param_top_p", [sampling.top_p])
        if sampling.top_k:
            inputs.add("sampling_param_top_k", [sampling.top_k])
    inputs.add("sampling_param_seed", [seed_at(sampling.seed, answered)])
    if sampling.presence_penalty:
        inputs.add("sampling_param_presence_penalty", [sampling.presence_penalty])
    if sampling.frequency_penalty:
        inputs.add("sampling_param_frequency_penalty", [sampling.frequency_penalty])


def text_before(codec: TextCodec, card: ModelCard, tokens: Sequence[int]) -> str:
    """The text of prompt and answer so far; the engine's tokenizer puts BOS before it itself."""
    if card.add_bos and tokens and tokens[0] == card.bos_id:
        tokens = tokens[1:]
    return codec.written(tokens)


class Cursor:
    """Makes deltas of an answer's text so far."""

    def __init__(self, codec: TextCodec, left: int) -> None:
        self._codec = codec
        self._left = left
        self._told = ""
        self.finished = False

    def take(self, result: Any) -> TokenDelta | None:
        """What is new in a response.

        Raises:
            Refused: its text does not begin with the one before.
        """
        word = text_of(result, "finish_reason")
        finish = None if word is None or word in _RUNNING else _reason(word)
        return self._grown(text_of(result, "text_output") or "", finish)

    def end(self) -> TokenDelta:
        """The stream ended without a reason: not an answer that can be trusted."""
        raise Refused(FAILED, "the answer ended without a finish_reason")

    def _grown(self, text: str, finish: EndReason | None) -> TokenDelta | None:
        if not finish:  # the last character may lack bytes that are yet to come
            text = text.rstrip(_UNFINISHED)
            if len(text) < len(self._told):
                return None
        if not text.startswith(self._told):
            raise Refused(FAILED, f"a text of {len(text)} characters that does not go on")
        new = text[len(self._told) :]
        self._told = text
        tokens = tuple(self._codec.encode(new, add_bos=False)) if new else ()
        tokens, finish = self._within(tokens, finish)
        self.finished = finish is not None
        return TokenDelta(tokens, finish, recounted=True) if tokens or finish else None

    def _within(
        self, tokens: tuple[int, ...], finish: EndReason | None
    ) -> tuple[tuple[int, ...], EndReason | None]:
        """No more tokens than were asked for, whatever way pieces are split."""
        if len(tokens) > self._left:
            tokens, finish = tokens[: self._left], EndReason.LENGTH
        self._left -= len(tokens)
        if not self._left and finish is None:
            finish = EndReason.LENGTH
        return tokens, finish


def _reason(word: str) -> EndReason:
    if word in ("stop", "length"):
        return EndReason(word)
    raise Refused(FAILED, f"expected finish_reason stop or length, got {word!r}")
