"""What SGLang is asked, as JSON: the same of both servers."""

from typing import Any

import msgspec

from diptych_contracts.errors import Permanent
from diptych_engine.over_http.resuming import see_grammar_begins
from diptych_engine.over_http.sampling import sampling_fields
from diptych_engine.port import SequenceWork
from diptych_engine.sglang.rooms import Room

GENERATE = "/generate"
_ALL = -1
"""SGLang's `top_k` for no limit; ours is 0."""


def rid(work: SequenceWork) -> str:
    """What SGLang calls the attempt, at both servers.

    It aborts whatever *begins* with a name: without its end, attempt 1 would take 10 along.
    """
    return f"{work.key.request_id}.{work.key.attempt}."


def question(work: SequenceWork, eos_ids: tuple[int, ...], salt: str, room: Room | None) -> bytes:
    """The whole answer, streamed.

    Args:
        work: What is asked.
        eos_ids: Tokens that end an answer.
        salt: Keeps the tenant's cache apart; empty: there is no tenant.
        room: Where the legs meet; None: one server does both.
    """
    sampling = work.sampling
    asked: dict[str, Any] = {
        "input_ids": [*work.prompt_ids, *work.answer_ids],
        "rid": rid(work),
        "stream": True,
        "sampling_params": _sampling(work, eos_ids),
    }
    if sampling.top_logprobs is not None:
        asked |= {"return_logprob": True, "logprob_start_len": -1}
        asked["top_logprobs_num"] = sampling.top_logprobs
    if salt:
        asked["extra_key"] = salt
    if room is not None:
        asked["bootstrap_host"] = room.host
        asked["bootstrap_port"] = room.port
        asked["bootstrap_room"] = room.room
    return msgspec.json.encode(asked)


def _sampling(work: SequenceWork, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    sampling = work.sampling
    asked = sampling_fields(work, eos_ids, seed="sampling_seed")
    asked["max_new_tokens"] = work.stopping.max_tokens - len(work.answer_ids)
    asked["top_k"] = sampling.top_k or _ALL
    if sampling.grammar is not None:
        see_grammar_begins(work)
        if sampling.grammar.kind != "json_schema":
            raise Permanent("this answer needs a grammar in Lark, which SGLang does not obey")
        asked["json_schema"] = sampling.grammar.text
    return asked
