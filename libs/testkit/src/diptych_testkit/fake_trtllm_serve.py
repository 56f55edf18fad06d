"""`trtllm-serve` without a GPU: its HTTP, its strict bodies and its bad habits.

Behind it is the fake LLM. Like the real one it tells the tokens of a part by `token_ids_diff`,
breaks a stream off where a request fails after status 200, answers 400 to whatever an engine says,
and looks only now and then whether its client is still there.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from diptych_testkit.fake_tensorrt_llm import shapes
from diptych_testkit.fake_tensorrt_llm.installed import Installed
from diptych_testkit.toy_engine import EOS_ID

LOOK_S = 0.02
"""How often it looks whether a client is still there: a second, in the real one."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    include_usage: bool = True
    continuous_usage_stats: bool = False


class HandOff(_Strict):
    request_type: str
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None


class HandOff13(HandOff):
    first_gen_log_probs: list[Any] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None


class CompletionRequest(_Strict):
    model: str
    prompt: list[int]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    disaggregated_params: HandOff | None = None


class CompletionRequest13(CompletionRequest):
    disaggregated_params: HandOff13 | None = None


class FakeServe:
    """One server.

    Args:
        installed: The engine behind it.
        repeats_first: Whether decode's first part repeats prefill's token: versions differ.
        kv_transfer_timeout_ms: After which it frees KV that nobody fetched.
    """

    def __init__(
        self,
        installed: Installed,
        *,
        repeats_first: bool = True,
        kv_transfer_timeout_ms: int = 60_000,
    ) -> None:
        self.installed = installed
        self._repeats_first = repeats_first
        config = {"backend": "UCX", "max_tokens_in_buffer": 4096}
        config["kv_transfer_timeout_ms"] = kv_transfer_timeout_ms
        self.llm = installed.names["LLM"](
            model="toy",
            backend="pytorch",
            cache_transceiver_config=installed.names["CacheTransceiverConfig"](**config),
            kv_cache_config=shapes.KvCacheConfig(tokens_per_block=4, event_buffer_max_size=1024),
            enable_iter_perf_stats=True,
            max_seq_len=4096,
        )
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.event_readers = 0
        self._watchers: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeServe"]:
        """Listen on a free port."""
        routes = [
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/kv_cache_events", self._events, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn's flag
            await asyncio.sleep(0.001)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await serving
            for task in list(self._watchers):
                task.cancel()
            self.llm.shutdown()

    async def _health(self, _: Request) -> Response:
        return Response(status_code=503 if self.installed.faults.dead else 200)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": self.installed.version})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    async def _metrics(self, _: Request) -> Response:
        return JSONResponse([told async for told in self.llm.get_stats_async(0.01)])

    async def _events(self, _: Request) -> Response:
        return JSONResponse([told async for told in self.llm.get_kv_cache_events_async(0.01)])

    async def _completions(self, request: Request) -> Response:
        data = await request.json()
        self.bodies.append(data)
        old = self.installed.version.startswith("1.2")
        try:
            asked = (CompletionRequest if old else CompletionRequest13).model_validate(data)
        except ValidationError as err:
            return JSONResponse({"error": str(err)}, status_code=400)
        try:
            result = self.llm.generate_async(
                asked.prompt,
                sampling_params=_sampling(asked),
                streaming=asked.stream,
                disaggregated_params=self._leg(asked.disaggregated_params),
            )
            self._watch(request, result)
            if asked.stream:
                parts = self._parts(result, asked)
                return StreamingResponse(parts, media_type="text/event-stream")
            await result.aresult()
        except Exception as err:  # as the real one: everything is the client's fault
            told = {"object": "error", "message": str(err), "type": "BadRequestError", "code": 400}
            return JSONResponse(told, status_code=400)
        return JSONResponse(self._answer(result, asked))

    def _leg(self, asked: HandOff | None) -> Any:
        if asked is None:
            return None
        fields = asked.model_dump(exclude_none=True)
        if (state := fields.pop("encoded_opaque_state", None)) is not None:
            fields["opaque_state"] = base64.b64decode(state)
        return self.installed.names["DisaggregatedParams"](**fields)

    def _watch(self, request: Request, result: Any) -> None:
        async def watch() -> None:
            while not await request.is_disconnected():  # noqa: ASYNC110 - as the real one
                await asyncio.sleep(LOOK_S)
            if not result.finished:
                result.abort()

        task = asyncio.create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _parts(self, result: Any, asked: CompletionRequest) -> AsyncIterator[bytes]:
        options, step = asked.stream_options, 0
        leg = asked.disaggregated_params
        async for _ in result:
            step += 1
            output = result.outputs[0]
            diff = output.token_ids_diff
            if leg is not None and step == 1 and not self._repeats_first:
                diff = []
            choice = {
                "index": 0,
                "text": "",
                "token_ids": None if asked.detokenize else diff,
                "finish_reason": output.finish_reason,
            }
            usage = None
            if options is not None and options.continuous_usage_stats:
                usage = _usage(result, asked)
            yield _event({"object": "text_completion", "choices": [choice], "usage": usage})
        if options is not None and options.include_usage:
            yield _event(
                {"object": "text_completion", "choices": [], "usage": _usage(result, asked)}
            )
        yield b"data: [DONE]\n\n"

    def _answer(self, result: Any, asked: CompletionRequest) -> dict[str, Any]:
        output = result.outputs[0]
        given = output.disaggregated_params
        told = None
        if given is not None:
            told = {
                "request_type": given.request_type,
                "first_gen_tokens": given.first_gen_tokens,
                "ctx_request_id": given.ctx_request_id,
                "encoded_opaque_state": base64.b64encode(given.opaque_state).decode(),
                "draft_tokens": None,
            }
            if getattr(given, "disagg_request_id", None) is not None:
                told["disagg_request_id"] = given.disagg_request_id
        choice = {
            "index": 0,
            "text": "",
            "token_ids": None if asked.detokenize else output.token_ids,
            "finish_reason": output.finish_reason,
            "disaggregated_params": told,
        }
        return {
            "object": "text_completion",
            "choices": [choice],
            "usage": _usage(result, asked),
            "prompt_token_ids": asked.prompt if asked.disaggregated_params else None,
        }


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + JSONResponse(told).body + b"\n\n"


def _usage(result: Any, asked: CompletionRequest) -> dict[str, Any]:
    details = {"cached_tokens": getattr(result, "cached_tokens", 0)}
    count = result.outputs[0].length
    return {
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": count,
        "total_tokens": len(asked.prompt) + count,
        "prompt_tokens_details": details,
    }


def _sampling(asked: CompletionRequest) -> shapes.SamplingParams:
    return shapes.SamplingParams(
        end_id=EOS_ID,
        max_tokens=asked.max_tokens if asked.max_tokens is not None else 16,
        stop_token_ids=asked.stop_token_ids or None,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=asked.seed,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        ignore_eos=asked.ignore_eos,
        detokenize=asked.detokenize,
    )
