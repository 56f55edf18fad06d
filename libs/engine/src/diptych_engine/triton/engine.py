"""The adapter: one model of one Triton server as a `RequestEngine`."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.adapters import AdapterSettings
from diptych_engine.over_http.addresses import http_url
from diptych_engine.port import EngineSpec, Phase, SequenceKey, SequenceWork
from diptych_engine.request_port import EngineStats, KvEvent, TokenDelta
from diptych_engine.triton import inflight, llmapi, metrics
from diptych_engine.triton.calls import Call
from diptych_engine.triton.failures import FAILED, of_call
from diptych_engine.triton.served import Flavour, Served, read_served
from diptych_engine.triton.settings import TritonOptions, grpc_target
from diptych_text.codec import TextCodec

KIND = "triton_trtllm"
_LOOK_S = 0.5
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that comes back is found at once
    ("grpc.enable_http_proxy", 0),  # an engine is inside, whatever proxy the environment names
]
"""No keepalive: Triton answers pings more often than every 5 minutes by closing the connection. A
server that hangs is found by the health probe."""
T = TypeVar("T")


def make(settings: AdapterSettings) -> "TritonEngine":
    """The adapter for a worker's settings, not started. Raises `Permanent` for bad options."""
    return TritonEngine(settings, settings.options_as(TritonOptions))


class TritonEngine:
    """See `request_port.RequestEngine`; the spec is there once it has started."""

    spec: EngineSpec

    def __init__(self, settings: AdapterSettings, options: TritonOptions) -> None:
        self._settings = settings
        self._options = options
        self._card = settings.card
        self._codec = TextCodec.from_card(settings.card)
        self._model = settings.engine_model or settings.card.model
        grpc_target(settings.url)
        if options.metrics_url:
            http_url(options.metrics_url, "metrics_url")
        self._calls = itertools.count(1)
        self._heard_s = 0.0
        self._client: triton.InferenceServerClient
        self._served: Served

    async def start(self) -> None:
        """Wait for the server, load the model if asked to, and read what it is.

        Raises:
            EngineGone: it is not ready in time.
            Permanent: it is no model that can be served from here.
        """
        roots = self._options.tls_roots
        try:
            self._client = triton.InferenceServerClient(
                grpc_target(self._settings.url),
                ssl=bool(roots),
                root_certificates=roots or None,
                channel_args=_CHANNEL,
            )
        except OSError as err:
            raise Permanent(f"cannot read tls_roots {roots}: {err.strerror}") from err
        about = await self._ready()
        config = await self._asked(self._client.get_model_config, self._model, as_json=True)
        self._served = read_served(config["config"], about["version"])
        if self._served.reuses_kv and not self._options.tenants_share_kv:
            raise Permanent(
                f"model {self._model!r} reuses KV for whoever sends such a prompt: set its "
                f"parameter enable_kv_cache_reuse to false, or the option tenants_share_kv to true"
            )
        self.spec = self._spec(await self._page())

    async def _ready(self) -> Mapping[str, Any]:
        """Wait until the model is there; gives the server's description of itself."""
        give_up_s = time.monotonic() + self._options.ready_s
        while True:
            try:
                about: Mapping[str, Any] = await self._asked(
                    self._client.get_server_metadata, as_json=True
                )
                if self._options.manage_model:
                    await self._load()
                if await self._asked(self._client.is_model_ready, self._model):
                    return about
                reason = f"triton: model {self._model!r} is not ready"
            except EngineGone as err:
                reason = str(err)
            if time.monotonic() > give_up_s:
                raise EngineGone(f"{reason} after {self._options.ready_s} s")
            await asyncio.sleep(_LOOK_S)

    async def _load(self) -> None:
        try:
            await self._client.load_model(self._model, client_timeout=self._options.ready_s)
        except InferenceServerException as err:
            raise Permanent(
                f"triton does not load model {self._model!r} (manage_model wants a server with "
                f"--model-control-mode=explicit): {err.message()}"
            ) from err

    def _spec(self, page: metrics.Page | None) -> EngineSpec:
        served, card, dtype = self._served, self._card, self._options.dtype
        terms = HandOffTerms(
            kind=KIND,
            engine_version=served.server_version,
            first_token=FirstToken(self._options.first_token),
            orphan_ms=self._options.orphan_ms,
        )
        return EngineSpec(
            engine=f"triton-{served.server_version}-{served.flavour}",
            # Not of the model's name here: its context and its generation may have two.
            fingerprint=replace(self._settings, engine_model="").fingerprint(dtype=dtype),
            layout=self._settings.layout(block_tokens=card.block_tokens, dtype=dtype),
            context_tokens=card.context_tokens,
            kv_tokens=(page and page.kv_tokens) or self._settings.kv_tokens,
            max_sequences=self._settings.max_sequences,
            vocab_size=card.vocab_size,
            eos_ids=card.eos_ids,
            hand_off=terms if served.hands_over else None,
            unsupported=served.unsupported,
        )

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the context, and offer its reply; see `request_port.RequestEngine`."""
        if self.spec.hand_off is None:
            raise Permanent(f"model {self._model!r} hands nothing over")
        asked = inflight.question(work)
        if asked.left == 1:  # the whole answer: nothing is left to be handed over
            return await self._one(work, patient=True)
        asked = asked._replace(kind=inflight.CONTEXT)
        first = TokenDelta(())
        async with _Asking(self, work, self._inflight(work, asked)) as call:
            cursor, params = inflight.Cursor(asked, self._stops(work)), None
            while (result := await self._heard(call)) is not None:
                params = inflight.params_of(result) or params
                first = cursor.take(inflight.new_tokens(result)) or first
        if first.finish is not None:
            return first
        if params is None:
            raise Refused(FAILED, "the context model gave no context_phase_params")
        decode = self.spec.hand_off.first_token is FirstToken.DECODE
        if not decode and len(first.token_ids) != 1:
            raise Refused(
                FAILED,
                f"expected one token of the context, got {len(first.token_ids)}: set the option "
                f"first_token to 'decode' if this engine gives none",
            )
        offer(
            EngineHandOff(
                terms=self.spec.hand_off,
                opaque=inflight.Opaque(len(asked.tokens), params).encode(),
            )
        )
        return TokenDelta(()) if decode else first

    async def _one(self, work: SequenceWork, *, patient: bool) -> TokenDelta:
        """An answer of one token at most."""
        async with contextlib.aclosing(self._answer(work, patient=patient)) as deltas:
            async for delta in deltas:
                return delta
        raise Refused(FAILED, "the answer ended without a finish")

    def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens; see `request_port.RequestEngine`."""
        return self._answer(work, patient=True)

    async def _answer(
        self, work: SequenceWork, *, patient: bool
    ) -> AsyncGenerator[TokenDelta, None]:
        if self._served.flavour is Flavour.LLM_API:
            tokens = [*work.prompt_ids, *work.answer_ids]
            text = llmapi.text_before(self._codec, self._card, tokens)
            request = llmapi.request(self._served, work, text)
            left = work.stopping.max_tokens - len(work.answer_ids)
            texts = llmapi.Cursor(self._codec, left)
            take, end = texts.take, texts.end
        else:
            asked = inflight.question(work)
            request = self._inflight(work, asked)
            cursor = inflight.Cursor(asked, self._stops(work))
            end = cursor.end

            def take(result: Any) -> TokenDelta | None:
                return cursor.take(inflight.new_tokens(result))

        asking = _Asking(self, work, request, patient=patient)
        async with asking as call:
            while not asking.finished:
                result = await self._heard(call)
                delta = end() if result is None else take(result)
                if delta is not None:
                    asking.finished = delta.finish is not None
                    yield delta

    def _inflight(self, work: SequenceWork, asked: inflight.Question) -> dict[str, Any]:
        return inflight.request(self._served, asked, work, self._card.eos_ids)

    def _stops(self, work: SequenceWork) -> tuple[int, ...]:
        return () if work.stopping.ignore_eos else self._card.eos_ids

    async def _heard(self, call: Call) -> Any:
        result = await call.next()
        self._heard_s = time.monotonic()
        return result

    def begin(self, work: SequenceWork, request: dict[str, Any]) -> tuple[str, Call]:
        """Send a request; gives the name it has there."""
        name = f"{work.key.request_id}.{work.key.attempt}.{next(self._calls)}"
        sent = {**request, "request_id": name}
        return name, Call(self._client, sent, deadline_s=self._options.answer_s)

    async def let_go(self, name: str, call: Call, *, defer: bool) -> None:
        """Return once the server has nothing of a request any more, or cannot be asked."""
        within_s = self._options.let_go_s
        try:
            if defer:  # a transfer that is broken off would leave prefill's side hanging
                await call.first(within_s)
            if not call.over and "stop" in self._served.inputs:
                await self._stop(name)
                await call.ended(within_s)
        finally:
            if not call.over:
                await call.cancel()

    async def _stop(self, name: str) -> None:
        """Ask for the end of a request: its own stream then ends when the engine is done with it.

        Breaking the call off has the same effect, but nobody hears when.
        """
        stop = inflight if self._served.flavour is Flavour.INFLIGHT else llmapi
        request = {**stop.stop_request(self._served), "request_id": name}
        call = Call(self._client, request, deadline_s=self._options.let_go_s)
        if not await call.ended(self._options.let_go_s):
            await call.cancel()

    async def stats(self) -> EngineStats:
        """How full it is, where the metrics page is known."""
        page = await self._page()
        return EngineStats() if page is None else page.stats

    async def _page(self) -> metrics.Page | None:
        if not self._options.metrics_url:
            return None
        try:
            text = await asyncio.to_thread(
                metrics.fetch, self._options.metrics_url, self._options.call_s
            )
        except OSError as err:
            raise EngineGone(f"triton: no metrics page: {err}") from err
        return metrics.read_page(text, self._model)

    async def kv_events(self) -> AsyncIterator[KvEvent]:
        """None: Triton does not tell which KV a model keeps."""
        return
        yield

    async def health(self) -> None:
        """Have it compute one token. Raises `EngineGone`.

        A busy engine may let the probe wait: that it answers others is enough.
        """
        if not await self._asked(self._client.is_server_ready):
            raise EngineGone("triton: the server is not ready")
        if not await self._asked(self._client.is_model_ready, self._model):
            raise EngineGone(f"triton: model {self._model!r} is not ready")
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(self._options.probe_s):
                await self._one(self._probe(), patient=False)
        except TimeoutError:
            if self._heard_s < since_s:
                raise EngineGone(f"triton: no token within {self._options.probe_s} s") from None
        except EngineGone:
            raise
        except Refused:
            return  # it is full: that is an answer
        except DiptychError as err:
            raise EngineGone(f"triton: the probe failed: {err}") from err

    def _probe(self) -> SequenceWork:
        return SequenceWork(
            key=SequenceKey(RequestId("health"), 1),
            phase=Phase.GENERATE,
            prompt_ids=self._codec.encode("a"),
            answer_ids=(),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1),
        )

    async def _asked(self, call: Callable[..., Awaitable[T]], *args: Any, **more: Any) -> T:
        """The answer to a unary call. Raises what `failures` makes of its error."""
        try:
            return await call(*args, client_timeout=self._options.call_s, **more)
        except InferenceServerException as err:
            raise of_call(str(err.status()), err.message()) from err

    async def close(self) -> None:
        """Unload the model if it was loaded from here, and close the connection."""
        if not hasattr(self, "_client"):
            return
        if self._options.manage_model:
            with contextlib.suppress(DiptychError):
                await self._asked(self._client.unload_model, self._model)
        await self._client.close()


class _Asking:
    """A request for as long as somebody reads its answer; on the way out nothing is left of it.

    An impatient one is broken off and not waited for.
    """

    def __init__(
        self,
        engine: TritonEngine,
        work: SequenceWork,
        request: dict[str, Any],
        *,
        patient: bool = True,
    ) -> None:
        self._engine = engine
        self._defer = work.hand_off is not None
        self._patient = patient
        self._name, self._call = engine.begin(work, request)
        self.finished = False
        """Whether the answer is complete, though the stream may not have ended yet."""

    async def __aenter__(self) -> Call:
        return self._call

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        call = self._call
        ends = self.finished or kind is None or issubclass(kind, DiptychError)
        if ends and await call.ended(_LOOK_S):
            return
        if self._patient:
            await self._engine.let_go(self._name, call, defer=self._defer and not call.answered)
        elif not call.over:
            await call.cancel()
