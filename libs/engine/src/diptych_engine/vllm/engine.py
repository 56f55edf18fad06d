"""A vLLM server as a `RequestEngine`.

Prefill asks for one token and the KV's description, which decode's server fetches the KV by; that
one token is thrown away, and decode samples it again. Closing a connection aborts. KV nobody
fetches is free again when its lease is over, so a prefill that is given up needs nothing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from http import HTTPStatus

import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Incompatible, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import EndReason
from diptych_engine.adapters import AdapterSettings
from diptych_engine.over_http.client import EngineHttp
from diptych_engine.over_http.contract import see_version, version_key
from diptych_engine.over_http.events import see_error
from diptych_engine.over_http.exposition import labels, totals
from diptych_engine.over_http.liveness import Liveness, until_ready
from diptych_engine.over_http.reading import from_json
from diptych_engine.over_http.salts import Salts
from diptych_engine.port import EngineSpec, SequenceWork
from diptych_engine.request_port import EngineStats, KvEvent, TokenDelta
from diptych_engine.vllm.answers import Answer, delta, offered_by, read_answer
from diptych_engine.vllm.asking import GENERATE, Asking
from diptych_engine.vllm.audit import HandOffAudit, HandOffCounts
from diptych_engine.vllm.contract import CONTRACT
from diptych_engine.vllm.kv_events import BlockChains, KvListener, see_endpoint
from diptych_engine.vllm.options import VllmOptions

log = logging.getLogger("diptych.engine")

ANSWER_S = 5.0
USAGE_S = 5.0
"""How long an answer's end waits for the usage that follows it at once."""
MAX_OPAQUE_BYTES = 512 * 1024
"""Block ids of a million tokens; NATS takes 1 MB in all."""
_IN_TIME = 0.8
"""Of its lease, for handing KV over: once that is over vLLM (0.32) fetches what lies there now."""
_BLOCK_TOKENS = 16
_NOTHING = b"null"


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    root: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class VllmEngine:
    """One server.

    Args:
        settings: Where it is, and what it serves.
        options: How it was started.
    """

    def __init__(self, settings: AdapterSettings, options: VllmOptions) -> None:
        if not settings.url:
            raise Permanent("engine 'vllm' needs engine_url: where its server listens")
        for name in ("kv_events", "kv_replay"):
            see_endpoint(getattr(options, name), name)
        self._settings = settings
        self._options = options
        self._http = EngineHttp(settings.url, api_key=options.api_key)
        self._salts = Salts()
        self._liveness = Liveness(silence_s=options.silence_s, probe_s=options.probe_s)
        self._asking = Asking(model=settings.engine_model, token_level=False, lark=options.lark)
        self.counts = HandOffCounts()
        self._audit = HandOffAudit(self.counts, _BLOCK_TOKENS)
        self.spec: EngineSpec = settings.spec(block_tokens=_BLOCK_TOKENS, dtype="auto")

    async def start(self) -> None:
        """Wait for the server and learn what it is; see `RequestEngine`."""
        version = await self._version()
        see_version(CONTRACT, version)
        model = await self._model()
        token_level = await self._knows_token_level(version)
        self._asking = Asking(model=model.id, token_level=token_level, lark=self._options.lark)
        self._describe(version, model, await self._metrics())
        door = self._asking.path
        log.info(
            "engine_found", extra={"engine": self.spec.engine, "url": self._http.url, "door": door}
        )

    async def _version(self) -> str:
        async def ask() -> str:
            told = await self._http.get("/version", within_s=ANSWER_S)
            try:
                version: _Version = from_json(told, _Version)
            except msgspec.DecodeError as err:
                raise Permanent(f"{self._http.url} is no vLLM: {err}") from err
            return version.version

        return await until_ready(ask, within_s=self._options.start_s)

    async def _model(self) -> _Model:
        async def ask() -> bytes:
            return await self._http.get("/v1/models", within_s=ANSWER_S)

        told = await until_ready(ask, within_s=self._options.start_s)
        try:
            models: _Models = from_json(told, _Models)
        except msgspec.DecodeError as err:
            raise Permanent(f"{self._http.url}/v1/models: no vLLM's answer: {err}") from err
        wanted = self._settings.engine_model
        for model in models.data:
            if wanted in ("", model.id):
                return model
        seen = ", ".join(model.id for model in models.data) or "nothing"
        raise Permanent(f"{self._http.url} does not serve {wanted!r}, but {seen}")

    async def _knows_token_level(self, version: str) -> bool:
        if self._options.token_level == "off":
            return False
        since = CONTRACT.calls["generate"].since
        if version_key(version) < version_key(since):
            log.info("token_level_endpoint_is_too_old", extra={"version": version, "since": since})
            return False
        status = await self._http.status("POST", GENERATE, b"{}", within_s=ANSWER_S)
        if status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            log.info("token_level_endpoint_is_off", extra={"url": self._http.url, "status": status})
            return False
        return True

    def _describe(self, version: str, model: _Model, page: str) -> None:
        cache = labels(page, "vllm:cache_config_info")
        block_tokens = _count(cache.get("block_size"), _BLOCK_TOKENS)
        blocks = _count(cache.get("num_gpu_blocks"), 0)
        settings = self._settings
        terms = HandOffTerms(
            kind="vllm_nixl",
            engine_version=f"{version} {model.root or model.id}",
            first_token=FirstToken.DECODE,
            orphan_ms=round(self._options.lease_s * 1000 * _IN_TIME),
        )
        context = model.max_model_len or settings.card.context_tokens
        self.spec = replace(
            self.spec,
            engine=f"vllm {version}",
            layout=settings.layout(
                block_tokens=block_tokens, dtype=cache.get("cache_dtype", "auto")
            ),
            context_tokens=min(context, settings.card.context_tokens),
            kv_tokens=blocks * block_tokens or settings.kv_tokens,
            hand_off=terms if self._options.hand_off else None,
        )
        self._audit = HandOffAudit(self.counts, block_tokens)
        self._audit.read(totals(page, "vllm:"))

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the prompt; see `RequestEngine`."""
        terms = self.spec.hand_off
        if terms is None:
            raise Refused(RefusalReason.UNSUPPORTED, "this vLLM runs without the NIXL connector")
        body = self._asking.prefill(work, self.spec.eos_ids, self._salt(work))
        with self._liveness.asking():
            data = await self._http.post(
                self._asking.path,
                body,
                within_s=self._options.silence_s,
                headers=_named(work),
            )
            self._liveness.heard()
        see_error(data)
        answer = read_answer(data)
        if answer.aborted:
            raise Refused(
                RefusalReason.NO_ROOM, "vLLM aborted the prefill: there is no KV to fetch"
            )
        whole = self._whole_answer(work, answer)
        if whole is not None:
            return whole
        params = bytes(answer.kv_transfer_params)
        if len(params) > MAX_OPAQUE_BYTES:
            raise Permanent(f"vLLM describes its KV in {len(params)} bytes")
        if params == _NOTHING:
            self.counts.nothing_to_pull += 1
            log.warning("prefill_offers_no_kv", extra={"request_id": work.key.request_id})
        else:
            self.counts.offered += 1
        offer(EngineHandOff(terms=terms, opaque=params))
        return TokenDelta((), cached_tokens=answer.cached_tokens)

    def _whole_answer(self, work: SequenceWork, answer: Answer) -> TokenDelta | None:
        """Prefill's token, where the answer ends with it."""
        found = self._delta(work, answer)
        left = work.stopping.max_tokens - len(work.answer_ids)
        if found is None or (left > 1 and found.finish is not EndReason.STOP):
            return None
        return found._replace(cached_tokens=answer.cached_tokens)

    async def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens; see `RequestEngine`."""
        params = self._params(work)
        body = self._asking.answer(work, self.spec.eos_ids, self._salt(work), params)
        offered = offered_by(bytes(params)) if params is not None else None
        tells_its_own = offered is not None and offered.remote_prefill_cached_tokens is None
        ended, begun, cached_tokens = False, False, None
        try:
            async with aclosing(self._answers(work, body)) as answers:
                async for answer in answers:
                    found = self._delta(work, answer)
                    if found is None or ended:
                        continue
                    begun, ended = True, found.finish is not None
                    if ended and tells_its_own:  # nobody listens once the end is told
                        cached_tokens = await _cached_tokens(answers)
                    yield found
            if not ended:
                raise EngineGone("vLLM's answer ended without a reason to finish")
        finally:
            if begun and offered is not None:
                self._audit.imported(offered.remote_num_tokens or 0, cached_tokens)

    async def _answers(self, work: SequenceWork, body: bytes) -> AsyncGenerator[Answer, None]:
        """The events of a streamed answer."""
        with self._liveness.asking():
            async with self._http.events(
                self._asking.path, body, silence_s=self._options.silence_s, headers=_named(work)
            ) as events:
                async for data in events:
                    self._liveness.heard()
                    yield read_answer(data)

    def _delta(self, work: SequenceWork, answer: Answer) -> TokenDelta | None:
        return delta(
            answer,
            self.spec.eos_ids,
            ignore_eos=work.stopping.ignore_eos,
            top=work.sampling.top_logprobs,
        )

    def _params(self, work: SequenceWork) -> msgspec.Raw | None:
        """What decode fetches KV by, as it came.

        Raises:
            Incompatible: it is none; within the request it would break that.
        """
        if work.hand_off is None or work.hand_off.opaque == _NOTHING:
            return None
        try:
            from_json(work.hand_off.opaque, dict[str, msgspec.Raw])
        except msgspec.DecodeError as err:
            raise Incompatible(f"no transfer params of vLLM: {err}") from err
        return msgspec.Raw(work.hand_off.opaque)

    def _salt(self, work: SequenceWork) -> str:
        return self._salts.salt(work.tenant) if work.tenant else ""

    async def stats(self) -> EngineStats:
        """How full it is; judges hand-offs by the way."""
        numbers = totals(await self._metrics(), "vllm:")
        self._audit.read(numbers)
        used = numbers.get("vllm:kv_cache_usage_perc")
        return EngineStats(
            running=_whole(numbers.get("vllm:num_requests_running")),
            waiting=_whole(numbers.get("vllm:num_requests_waiting")),
            kv_tokens_used=None if used is None else round(used * self.spec.kv_tokens),
            recomputed=self.counts.recomputed,
        )

    async def _metrics(self) -> str:
        return (await self._http.get("/metrics", within_s=ANSWER_S)).decode(errors="replace")

    async def kv_events(self) -> AsyncGenerator[KvEvent, None]:
        """What it keeps; ends at once if it was not told where vLLM publishes."""
        options = self._options
        if not options.kv_events:
            return
        listener = KvListener(
            options.kv_events,
            BlockChains(self._salts),
            replay=options.kv_replay,
            topic=options.kv_topic,
        )
        async for event in listener.events():
            yield event

    async def health(self) -> None:
        """Ask it: an idle one must make a token now and then, a busy one must get on."""
        await self._liveness.check(alive=self._get_health, proof=self._make_a_token)

    async def _get_health(self) -> None:
        status = await self._http.status("GET", "/health", None, within_s=ANSWER_S)
        if status != HTTPStatus.OK:
            raise EngineGone(f"vLLM says of its engine: {status}")

    async def _make_a_token(self) -> None:
        token = self.spec.eos_ids[0] if self.spec.eos_ids else 0
        await self._http.post(self._asking.path, self._asking.probe(token), within_s=ANSWER_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


def make(settings: AdapterSettings) -> VllmEngine:
    """The adapter; see `diptych_engine.adapters`."""
    return VllmEngine(settings, settings.options_as(VllmOptions))


async def _cached_tokens(answers: AsyncGenerator[Answer, None]) -> int | None:
    """How many prompt tokens had KV: it stands behind the end. None: it does not say in time."""
    with suppress(TimeoutError, DiptychError):
        async with asyncio.timeout(USAGE_S):
            async for answer in answers:
                if answer.usage is not None and not answer.choices:
                    return answer.cached_tokens
    return None


def _named(work: SequenceWork) -> dict[str, str]:
    return {"X-Request-Id": f"{work.key.request_id}.{work.key.attempt}"}


def _count(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else otherwise


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
