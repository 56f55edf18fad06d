"""TensorRT-LLM behind `trtllm-serve`: the same hand-offs over HTTP, one server beside each worker.

What HTTP takes away: logprobs (the server tells tokens by their text), the salt that keeps tenants'
KV apart, and an abort of its own: the server looks once a second whether we are still there.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_engine.over_http.addresses import http_url
from diptych_engine.over_http.events import events_of
from diptych_engine.over_http.reading import from_json
from diptych_engine.port import EngineSpec, SequenceWork
from diptych_engine.request_port import EngineStats, KvEvent, TokenDelta
from diptych_engine.tensorrt_llm import handing_over
from diptych_engine.tensorrt_llm.asking import left_of, tokens_of
from diptych_engine.tensorrt_llm.contract import shipped_contract
from diptych_engine.tensorrt_llm.cursors import BROKEN
from diptych_engine.tensorrt_llm.iteration_stats import stats_of
from diptych_engine.tensorrt_llm.kv_events import KvEventReader
from diptych_engine.tensorrt_llm.options import ServeOptions
from diptych_engine.tensorrt_llm.request_ids import RequestIds
from diptych_engine.tensorrt_llm.serve_cursor import PartCursor
from diptych_engine.tensorrt_llm.serve_wire import Completion, body_of, failure_of, read
from diptych_engine.tensorrt_llm.served import GUIDED, Served
from diptych_engine.tensorrt_llm.versions import Version, has_begun, in_range

RETRY_S = 0.5
"""Between two looks at a server that does not answer yet."""
DRAIN_S = 10.0
"""Deadline of a reading of events or statistics; the server itself takes up to 2 s."""


class TrtLlmServe:
    """A `RequestEngine` over HTTP.

    Args:
        served: The model; `checkpoint` is what the server calls it, empty: its first one.
        options: What the operator set.
        url: Where the server listens.
    """

    def __init__(self, served: Served, options: ServeOptions, *, url: str) -> None:
        self._served, self._options = served, options
        self._url = http_url(url, "engine_url")
        self._model = served.checkpoint
        self._client: httpx.AsyncClient | None = None
        self._answered = asyncio.Event()
        self._drain = asyncio.Lock()
        self._last = EngineStats()
        self._tenant: str | None = None
        self._version = Version.of("0")
        self.spec = self._spec("")

    def _spec(self, version: str) -> EngineSpec:
        guided = () if self._options.guided else GUIDED
        return self._served.spec(
            f"trtllm_serve-{version}",
            self._options,
            moves_as=f"serve/{version}",
            unsupported=("logprobs", "top_logprobs", "tool_choice", *guided),
        )

    async def start(self) -> None:
        """Wait for the server, and see which one it is.

        Raises:
            Permanent: it runs a version that this adapter is not written for, or no model.
            EngineGone: it does not answer in time.
        """
        options = self._options
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(options.stall_s, connect=options.connect_s)
        self._client = httpx.AsyncClient(
            base_url=self._url,
            limits=limits,
            timeout=timeout,
            headers={"content-type": "application/json"},
            trust_env=False,
        )
        try:
            async with asyncio.timeout(options.start_s):
                while not await self._is_up():  # noqa: ASYNC110 - over the network
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as err:
            raise EngineGone(f"{self._url} does not answer in {options.start_s} s") from err
        told = await self._json("GET", "/version")
        version = str(told.get("version", "")) if isinstance(told, dict) else ""
        try:
            self._version = Version.of(version)
        except ValueError as err:
            raise Permanent(f"{self._url} tells no version of TensorRT-LLM: {told}") from err
        wanted = shipped_contract().versions
        if not in_range(self._version, wanted):
            raise Permanent(f"{self._url} runs TensorRT-LLM {version}, expected {wanted}")
        self._model = self._model or await self._first_model()
        # Whether the id of both legs is known cannot be seen over HTTP: by version it is.
        self._ids = RequestIds(
            process_ids=not self._version < Version.of("1.3.0rc22"), machine=options.machine_id
        )
        self.spec = self._spec(version)

    async def _is_up(self) -> bool:
        try:
            await self.health()
        except EngineGone:
            return False
        return True

    async def _first_model(self) -> str:
        told = await self._json("GET", "/v1/models")
        models = told.get("data") if isinstance(told, dict) else None
        if not isinstance(models, list) or not models:
            raise Permanent(f"{self._url} serves no model")
        name = models[0].get("id") if isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise Permanent(f"{self._url}/v1/models tells no model's id")
        return name

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the prompt and offer its KV; see `request_port.RequestEngine`."""
        params: dict[str, Any] | None = None
        if left_of(work) > 1:
            params = {"request_type": "context_only"}
            if has_begun(self._version, "1.3"):
                params["disagg_request_id"] = self._ids.next()
        told = await self._whole(self._body(work, params, stream=False))
        self._answered.set()
        choice = told.choices[0]
        delta = PartCursor(work, self.spec.eos_ids).whole(told)
        if params is None or delta.finish is EndReason.STOP:
            return delta
        given = {k: v for k, v in (choice.disaggregated_params or {}).items() if v is not None}
        if not given.get("encoded_opaque_state") or not given.get("first_gen_tokens"):
            raise Refused(BROKEN, "the engine computed the prompt and gave no hand-off")
        offer(self._sealed(work, params | given))
        return delta._replace(finish=None)

    def _sealed(self, work: SequenceWork, given: dict[str, Any]) -> EngineHandOff:
        assert self.spec.hand_off is not None
        opaque = handing_over.sealed(
            given, version=self._version.text, prompt_tokens=len(tokens_of(work))
        )
        return EngineHandOff(terms=self.spec.hand_off, opaque=opaque)

    async def _whole(self, body: dict[str, Any]) -> Completion:
        try:
            response = await self._http.post("/v1/completions", content=msgspec.json.encode(body))
        except httpx.HTTPError as err:
            raise await self._why(err) from err
        if response.status_code != 200:
            failure = failure_of(response.status_code, response.content)
            if isinstance(failure, Refused):
                await self.health()
            raise failure
        told = read(response.content)
        if told.failure is not None or not told.choices:
            raise Refused(BROKEN, f"trtllm-serve: {told.failure or 'no choice'}")
        return told

    async def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """Tokens as they come; see `request_port.RequestEngine`."""
        params = None if work.hand_off is None else self._taken(work, work.hand_off)
        body = msgspec.json.encode(self._body(work, params, stream=True))
        cursor = PartCursor(work, self.spec.eos_ids)
        request = self._http.build_request("POST", "/v1/completions", content=body)
        try:
            stream = await self._opened(request, fetching=params is not None)
        except Refused:
            await self.health()  # a dead engine is told as one request's failure too
            raise
        except httpx.HTTPError as err:
            raise await self._why(err) from err
        try:
            async for part in stream.parts():
                self._answered.set()
                delta = cursor.take(part)
                if delta.token_ids or delta.finish is not None:
                    yield delta
                if delta.finish is not None:
                    return
        except httpx.HTTPError as err:
            raise await self._why(err) from err
        finally:
            await stream.close()

    async def _opened(self, request: httpx.Request, *, fetching: bool) -> "_Stream":
        """The stream, its first part read. Decode that fetches KV is not broken off before it."""
        if not fetching:
            return await _begun(self._http, request)
        # In a task of its own: cancelling a read closes the connection.
        beginning = asyncio.ensure_future(_begun(self._http, request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            with contextlib.suppress(httpx.HTTPError, TimeoutError, DiptychError):
                async with asyncio.timeout(self._options.kv_transfer_timeout_ms / 1000 + 1):
                    await (await beginning).close()
            raise

    async def _why(self, err: httpx.HTTPError) -> DiptychError:
        """What a broken connection means: the server breaks one off where a request fails."""
        try:
            await self.health()
        except EngineGone as gone:
            return gone
        return Refused(BROKEN, f"trtllm-serve broke an answer off: {err!r}")

    def _taken(self, work: SequenceWork, hand_off: EngineHandOff) -> dict[str, Any]:
        envelope = handing_over.opened(
            hand_off, version=self._version.text, prompt_tokens=len(tokens_of(work)), known=None
        )
        return envelope.fields | {"request_type": "generation_only"}

    def _body(
        self, work: SequenceWork, params: dict[str, Any] | None, *, stream: bool
    ) -> dict[str, Any]:
        if work.sampling.top_logprobs is not None:
            raise Permanent("logprobs: trtllm-serve tells them by text, not by token")
        if (grammar := work.sampling.grammar) is not None:
            if grammar.kind != "json_schema" or not self._options.guided:
                raise Permanent("grammar: this server follows none of that kind")
            if len(work.answer_ids) > (work.hand_off is not None):
                raise Permanent("grammar: TensorRT-LLM cannot go on in the middle of an answer")
        if self._options.block_reuse:
            if self._tenant is None:
                self._tenant = work.tenant
            if work.tenant != self._tenant:
                raise Permanent(
                    "this server keeps KV of prompts for one tenant only: start it with "
                    "enable_block_reuse: false, and say so by the option 'block_reuse'"
                )
        return body_of(
            work, model=self._model, eos_ids=self.spec.eos_ids, params=params, stream=stream
        )

    async def stats(self) -> EngineStats:
        """How full the engine was in its last iteration."""
        if not self._answered.is_set():
            return EngineStats()
        async with self._drain:
            told = await self._json("GET", "/metrics", timeout=DRAIN_S)
            if isinstance(told, list) and told:
                self._last = stats_of(told[-1])
        return self._last

    async def kv_events(self) -> AsyncIterator[KvEvent]:
        """What the engine keeps, if the operator says that it tells us and nobody else."""
        if not (self._options.events and self._options.block_reuse):
            return
        reader = KvEventReader(self._options.tokens_per_block)
        await self._answered.wait()
        while True:
            told = await self._json("POST", "/kv_cache_events", timeout=DRAIN_S)
            for event in told if isinstance(told, list) else ():
                for news in reader.read(event):
                    yield news
            await asyncio.sleep(self._options.poll_s)

    async def health(self) -> None:
        """Ask the engine behind the server. Raises `EngineGone`."""
        try:
            response = await self._http.get("/health", timeout=self._options.connect_s)
        except httpx.HTTPError as err:
            raise self._lost(err) from err
        if response.status_code != 200:
            raise EngineGone(f"{self._url}/health answers {response.status_code}")

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _json(self, method: str, path: str, *, timeout: float | None = None) -> Any:
        wait = timeout or self._options.connect_s
        try:
            response = await self._http.request(method, path, timeout=wait)
        except httpx.HTTPError as err:
            raise self._lost(err) from err
        if response.status_code != 200:
            raise EngineGone(f"{self._url}{path} answers {response.status_code}")
        try:
            return from_json(response.content)
        except msgspec.DecodeError as err:
            raise EngineGone(f"{self._url}{path} answers no JSON: {err}") from err

    @property
    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EngineGone("trtllm-serve is not connected")
        return self._client

    def _lost(self, err: httpx.HTTPError) -> EngineGone:
        return EngineGone(f"trtllm-serve at {self._url}: {type(err).__name__}: {err}")


class _Stream:
    """A streamed answer whose first part is read."""

    def __init__(
        self,
        response: httpx.Response,
        rest: AsyncGenerator[Completion, None],
        first: Completion | None,
    ) -> None:
        self._response, self._rest, self._first = response, rest, first

    async def parts(self) -> AsyncGenerator[Completion, None]:
        """All parts."""
        if self._first is not None:
            yield self._first
            async for part in self._rest:
                yield part

    async def close(self) -> None:
        """Break it off, if it is not over: the server aborts when it sees that."""
        await self._rest.aclose()
        await self._response.aclose()


async def _begun(client: httpx.AsyncClient, request: httpx.Request) -> _Stream:
    response = await client.send(request, stream=True)
    try:
        if response.status_code != 200:
            raise failure_of(response.status_code, await response.aread())
        parts = _parts(response)
        return _Stream(response, parts, await anext(parts, None))
    except BaseException:
        await response.aclose()
        raise


async def _parts(response: httpx.Response) -> AsyncGenerator[Completion, None]:
    """The parts of a stream; what the server says against it is raised."""
    async for data in events_of(response.aiter_bytes()):
        part = read(data)
        if part.failure is not None:
            raise Refused(BROKEN, f"trtllm-serve: {part.failure}")
        yield part
