"""The engine: a toy model that answers each request in steps of its own."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from diptych_contracts.sampling import Sampling
from diptych_engine.sampling import chances, sample
from diptych_engine.sim import History
from diptych_testkit.fake_tensorrt_llm.keeping import KvCache
from diptych_testkit.fake_tensorrt_llm.results import (
    IterationResult,
    RequestOutput,
    RequestOutput13,
)
from diptych_testkit.fake_tensorrt_llm.shapes import (
    CacheTransceiverConfig12,
    CppExecutorError,
    DisaggregatedParams12,
    DisaggregatedParams13,
    Logprob,
    RequestError,
    SamplingParams,
    TorchLlmArgs,
)
from diptych_testkit.fake_tensorrt_llm.world import Faults, Ticket, World
from diptych_testkit.toy_engine import EOS_ID, toy_logits


class Llm:
    """Both versions' `LLM`; what differs stands in their subclasses."""

    world: ClassVar[World]
    faults: ClassVar[Faults]
    vocab_size: ClassVar[int] = 1000
    eos_at: ClassVar[int | None] = None
    """Length of a sequence after which end-of-text is the likeliest token; None: never."""
    params_type: ClassVar[type[DisaggregatedParams12]] = DisaggregatedParams12
    result_type: ClassVar[type[RequestOutput]] = RequestOutput
    made: ClassVar[list["Llm"]]

    def __init__(
        self,
        model: str,
        tokenizer: object = None,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if self.faults.refuses_to_start:
            raise RuntimeError(self.faults.refuses_to_start)
        self.args = TorchLlmArgs(
            model=model,
            skip_tokenizer_init=skip_tokenizer_init,
            tensor_parallel_size=tensor_parallel_size,
            **kwargs,
        )
        self.made.append(self)
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ran = asyncio.Event()
        self.used: list[SamplingParams] = []
        self._stats: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.active = 0
        self.cache = KvCache(self.args.kv_cache_config, self.faults)
        self.shut = False

    def shutdown(self) -> None:
        self.shut = True
        if self._loop is not None and not self._loop.is_closed():
            for task in list(self._tasks):
                self._loop.call_soon_threadsafe(task.cancel)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._stats, self._ran, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self.cache.events, self._ran, timeout)

    def _submit(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None,
        streaming: bool,
        disaggregated_params: DisaggregatedParams12 | None,
        cache_salt: str | None,
    ) -> RequestOutput:
        if self.shut or self.faults.dead:
            raise CppExecutorError("the executor is not running")
        sampling = self._checked(inputs, sampling_params, streaming, disaggregated_params)
        self._loop = asyncio.get_running_loop()
        aborted = asyncio.Event()
        result = self.result_type(next(self._ids), list(inputs), aborted.set)
        task = self._loop.create_task(
            self._serve(result, sampling, disaggregated_params, cache_salt, aborted)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return result

    def _checked(
        self,
        inputs: Sequence[int],
        sampling: SamplingParams | None,
        streaming: bool,
        params: DisaggregatedParams12 | None,
    ) -> SamplingParams:
        if not isinstance(inputs, list) or not all(type(token) is int for token in inputs):
            raise TypeError(f"The inputs must be a list of int, but got {type(inputs)}")
        if sampling is None or type(sampling) is not SamplingParams:
            raise TypeError("sampling_params must be SamplingParams")
        if any(sampling is one for one in self.used):
            self.world.misuse.append("SamplingParams were used twice")
        self.used.append(sampling)
        if self.args.skip_tokenizer_init and sampling.end_id is None:
            raise ValueError("end_id must be set if skip_tokenizer_init is True")
        limit = self.args.max_seq_len or 4096
        if not inputs or len(inputs) + 1 > limit or max(inputs) >= self.vocab_size:
            raise ValueError(f"The prompt of {len(inputs)} tokens does not fit {limit}")
        if sampling.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided decoding is not enabled")
        if params is not None:
            self._check_leg(sampling, streaming, params)
        return sampling

    def _check_leg(
        self, sampling: SamplingParams, streaming: bool, params: DisaggregatedParams12
    ) -> None:
        if type(params) is not self.params_type:
            raise TypeError(f"disaggregated_params: got {type(params)}")
        config = self.args.cache_transceiver_config
        if not isinstance(config, CacheTransceiverConfig12) or config.backend is None:
            raise ValueError("disaggregated serving needs a cache_transceiver_config")
        if params.request_type == "context_only":
            if streaming:
                raise ValueError("context_only requests cannot stream")
            sampling.max_tokens = 1
        elif not params.opaque_state or not params.first_gen_tokens:
            raise ValueError("generation_only needs opaque_state and first_gen_tokens")

    async def _serve(
        self,
        result: RequestOutput,
        sampling: SamplingParams,
        params: DisaggregatedParams12 | None,
        salt: str | None,
        aborted: asyncio.Event,
    ) -> None:
        self.active += 1
        try:
            await self._compute(result, sampling, params, salt, aborted)
        except RequestError as err:
            result.push(_raising(err))
        finally:
            self.active -= 1

    async def _compute(
        self,
        result: RequestOutput,
        sampling: SamplingParams,
        params: DisaggregatedParams12 | None,
        salt: str | None,
        aborted: asyncio.Event,
    ) -> None:
        answer: list[int] = []
        prompt = result.prompt_token_ids
        if params is not None and params.request_type == "generation_only":
            ticket = await self._fetch(result, params, salt, aborted)
            answer.append(ticket.first_token)
            result.push(_growing(result, answer, [_one_logprob(ticket.first_token)]))
        else:
            cached = self.cache.keep(prompt, salt)
            if isinstance(result, RequestOutput13):
                result.cached = cached
        while True:
            if await self._paused(aborted):
                result.push(_ending(result, "cancelled"))
                return
            if self.faults.dead:
                result.push(_raising(CppExecutorError("the executor died")))
                return
            room = (self.args.max_seq_len or 4096) - len(prompt)
            if len(answer) >= min(sampling.max_tokens, room):
                result.push(_ending(result, "length"))
                return
            token, told = self._next(prompt, answer, sampling)
            ended = _ends(token, sampling)
            self._tell(prompt, answer)
            if ended and not self.faults.end_token_in_outputs:
                result.push(_ending(result, "stop"))
                return
            answer.append(token)
            if params is not None and params.request_type == "context_only":
                self._hand_over(result, params, salt, token, told, ended=ended)
                return
            last = "stop" if ended else "length" if len(answer) >= sampling.max_tokens else None
            result.push(_growing(result, [token], [told], last))
            if last is not None:
                return

    async def _paused(self, aborted: asyncio.Event) -> bool:
        """Wait for a step's time; whether the request is aborted."""
        while self.faults.hangs and not self.faults.dead:  # noqa: ASYNC110 - a plain flag to set
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.faults.step_s)
        return aborted.is_set()

    async def _fetch(
        self,
        result: RequestOutput,
        params: DisaggregatedParams12,
        salt: str | None,
        aborted: asyncio.Event,
    ) -> Ticket:
        await asyncio.sleep(self.faults.transfer_s)
        if aborted.is_set():  # the transfer is torn down: what both sides hold stays held
            self.world.leaks.append(result.request_id)
            await asyncio.Event().wait()
        assert params.opaque_state is not None
        assert params.first_gen_tokens is not None
        if self.faults.transfer_fails:
            raise RequestError("the KV cache transfer timed out")
        try:
            ticket = self.world.fetch(params.opaque_state)
        except KeyError as err:
            raise RequestError("the context request is unknown") from err
        wanted = getattr(params, "disagg_request_id", None) or params.ctx_request_id
        if wanted != ticket.request_id:
            self.world.misuse.append(f"legs have ids {ticket.request_id} and {wanted}")
        if tuple(result.prompt_token_ids) != ticket.token_ids or salt != ticket.salt:
            self.world.misuse.append("decode was given another prompt than prefill")
        if params.first_gen_tokens != [ticket.first_token]:
            self.world.misuse.append("decode was given another first token than prefill's")
        return ticket

    def _hand_over(
        self,
        result: RequestOutput,
        params: DisaggregatedParams12,
        salt: str | None,
        token: int,
        told: dict[int, Logprob],
        *,
        ended: bool,
    ) -> None:
        if ended:
            result.push(_growing(result, [token], [told], "stop"))
            return
        own_id = getattr(params, "disagg_request_id", None)
        if own_id is not None and not 1 << 40 <= own_id < 1 << 63:
            self.world.misuse.append(f"disagg_request_id {own_id}")
        request_id = own_id or result.request_id
        config = self.args.cache_transceiver_config
        timeout_ms = config.kv_transfer_timeout_ms if config is not None else None
        state = self.world.pin(
            Ticket(tuple(result.prompt_token_ids), token, request_id, salt),
            timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        )
        fields: dict[str, Any] = {
            "request_type": "context_only",
            "first_gen_tokens": [token],
            "ctx_request_id": result.request_id if own_id is None else own_id,
            "opaque_state": state,
        }
        if self.params_type is DisaggregatedParams13:
            fields |= {"disagg_request_id": own_id, "first_gen_log_probs": [[told]]}
        given = None if self.faults.no_hand_off else self.params_type(**fields)
        result.push(_growing(result, [token], [told], "not_finished", given))

    def _next(
        self, prompt: list[int], answer: list[int], params: SamplingParams
    ) -> tuple[int, dict[int, Logprob]]:
        history, row = History([*prompt, *answer]), np.empty(self.vocab_size, np.float32)
        toy_logits(row, history)
        if self.eos_at is not None and len(history.tokens) >= self.eos_at:
            row[EOS_ID] = 20.0
        none_said = params.temperature is params.top_k is params.top_p is None
        sampling = Sampling(
            temperature=0.0 if none_said or params.top_k == 1 else params.temperature or 1.0,
            top_p=params.top_p or 1.0,
            top_k=params.top_k or 0,
            min_p=params.min_p or 0.0,
            seed=params.seed or 0,
            presence_penalty=params.presence_penalty or 0.0,
            frequency_penalty=params.frequency_penalty or 0.0,
            repetition_penalty=params.repetition_penalty or 1.0,
        )
        token = sample(row, sampling, prompt_ids=prompt, answer_ids=answer)
        chosen, *likeliest = chances(row, token, top=params.logprobs or 1)
        told = {other: Logprob(chance, rank + 1) for rank, (other, chance) in enumerate(likeliest)}
        return token, told | {chosen[0]: Logprob(chosen[1])}

    def _tell(self, prompt: list[int], answer: list[int]) -> None:
        """Statistics of one iteration."""
        self._ran.set()
        if self.args.enable_iter_perf_stats and self._stats.qsize() < 1000:
            used = -(-(len(prompt) + len(answer)) // self.args.kv_cache_config.tokens_per_block)
            blocks = {
                "usedNumBlocks": used,
                "tokensPerBlock": self.args.kv_cache_config.tokens_per_block,
            }
            self._stats.put_nowait(
                {
                    "iter": self._stats.qsize(),
                    "numActiveRequests": self.active,
                    "numQueuedRequests": 0,
                    "kvCacheStats": blocks,
                }
            )


def _ends(token: int, sampling: SamplingParams) -> bool:
    ends = (sampling.end_id, *(sampling.stop_token_ids or ()))
    return not sampling.ignore_eos and token in ends


def _one_logprob(token: int) -> dict[int, Logprob]:
    return {token: Logprob(0.0, 1)}


def _growing(
    result: RequestOutput,
    tokens: list[int],
    told: list[dict[int, Logprob]],
    reason: Any = None,
    given: Any = None,
) -> Any:
    fresh, chances_told = list(tokens), list(told)

    def step() -> bool:
        output = result.outputs[0]
        assert output.token_ids is not None
        assert output.logprobs is not None
        output._last = len(output.token_ids)
        output.token_ids.extend(fresh)
        output.logprobs.extend(chances_told)
        output.finish_reason = reason
        output.disaggregated_params = given
        return reason is not None

    return step


def _ending(result: RequestOutput, reason: Any) -> Any:
    return _growing(result, [], [], reason)


def _raising(error: Exception) -> Any:
    def step() -> bool:
        raise error

    return step


class Llm12(Llm):
    """`tensorrt_llm.LLM` of 1.2."""

    def generate_async(  # noqa: PLR0913 - the vendor's
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: object = None,
        prompt_adapter_request: object = None,
        streaming: bool = False,
        kv_cache_retention_config: object = None,
        disaggregated_params: DisaggregatedParams12 | None = None,
        scheduling_params: object = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        return self._submit(inputs, sampling_params, streaming, disaggregated_params, cache_salt)


class Llm13(Llm):
    """`tensorrt_llm.LLM` of 1.3."""

    params_type = DisaggregatedParams13
    result_type = RequestOutput13

    def generate_async(  # noqa: PLR0913 - the vendor's
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: object = None,
        streaming: bool = False,
        kv_cache_retention_config: object = None,
        disaggregated_params: DisaggregatedParams13 | None = None,
        trace_headers: dict[str, str] | None = None,
        scheduling_params: object = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        return self._submit(inputs, sampling_params, streaming, disaggregated_params, cache_salt)

    def _check_health(self) -> bool:
        return not (self.shut or self.faults.dead)
