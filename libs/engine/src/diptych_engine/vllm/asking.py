"""What vLLM is asked, as JSON."""

from typing import Any

import msgspec

from diptych_contracts.errors import Permanent
from diptych_contracts.sampling import Grammar
from diptych_engine.over_http.resuming import see_grammar_begins
from diptych_engine.over_http.sampling import sampling_fields
from diptych_engine.port import SequenceWork

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
MOST_LOGPROBS = 20
"""vLLM's own limit, `--max-logprobs`, where it is not set."""
PREFILL_PARAMS = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')


class Asking:
    """Writes requests for one server.

    Args:
        model: What the server calls its model.
        token_level: Whether it is asked at `/inference/v1/generate`.
        lark: Whether it obeys grammars in Lark.
    """

    def __init__(self, *, model: str, token_level: bool, lark: bool) -> None:
        self._model = model
        self._token_level = token_level
        self._lark = lark

    @property
    def path(self) -> str:
        """Where it is asked."""
        return GENERATE if self._token_level else COMPLETIONS

    def prefill(self, work: SequenceWork, eos_ids: tuple[int, ...], salt: str) -> bytes:
        """One token, not streamed: only such an answer carries what decode needs.

        An answer of one token is asked for without KV to fetch, which nobody would.
        """
        left = work.stopping.max_tokens - len(work.answer_ids)
        sampling = self._sampling(work, eos_ids) | {"max_tokens": 1, "min_tokens": 0}
        params = PREFILL_PARAMS if left > 1 else None
        return self._body(work, sampling, {"stream": False}, salt, params)

    def answer(
        self,
        work: SequenceWork,
        eos_ids: tuple[int, ...],
        salt: str,
        params: msgspec.Raw | None,
    ) -> bytes:
        """The whole answer, streamed. `params` go out exactly as they came."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return self._body(work, self._sampling(work, eos_ids), stream, salt, params)

    def probe(self, token_id: int) -> bytes:
        """One token after one token."""
        sampling = {"max_tokens": 1, "temperature": 0.0}
        return self._shaped([token_id], sampling, {"stream": False})

    def _body(
        self,
        work: SequenceWork,
        sampling: dict[str, Any],
        stream: dict[str, Any],
        salt: str,
        params: msgspec.Raw | None,
    ) -> bytes:
        more = dict(stream)
        if salt:
            more["cache_salt"] = salt
        if params is not None:
            more["kv_transfer_params"] = params
        return self._shaped([*work.prompt_ids, *work.answer_ids], sampling, more)

    def _shaped(self, ids: list[int], sampling: dict[str, Any], more: dict[str, Any]) -> bytes:
        more = {"model": self._model} | more
        if self._token_level:
            return msgspec.json.encode({"token_ids": ids, "sampling_params": sampling} | more)
        if "logprobs" in sampling:
            more["return_tokens_as_token_ids"] = True
        return msgspec.json.encode({"prompt": ids, "return_token_ids": True} | sampling | more)

    def _sampling(self, work: SequenceWork, eos_ids: tuple[int, ...]) -> dict[str, Any]:
        sampling = work.sampling
        asked = sampling_fields(work, eos_ids, seed="seed")
        asked["max_tokens"] = work.stopping.max_tokens - len(work.answer_ids)
        asked["top_k"] = sampling.top_k
        if sampling.top_logprobs is not None:
            asked["logprobs"] = self._likely(sampling.top_logprobs)
        if sampling.grammar is not None:
            asked["structured_outputs"] = self._structured(sampling.grammar, work)
        return asked

    def _likely(self, top: int) -> int:
        """One more at the token-level door: there the chosen token takes the place of one."""
        return top + 1 if self._token_level and 0 < top < MOST_LOGPROBS else top

    def _structured(self, grammar: Grammar, work: SequenceWork) -> dict[str, str]:
        see_grammar_begins(work)
        if grammar.kind == "json_schema":
            return {"json": grammar.text}
        if not self._lark:
            raise Permanent(
                "this answer needs a grammar in Lark: vLLM obeys it with the backend `guidance` "
                "only, and its worker was not told (`lark = true`) that it runs so"
            )
        return {"grammar": grammar.text}
