"""An SGLang server as a `RequestEngine`.

Both servers are asked the same at once and meet in a room that prefill's adapter has made, so the
hand-off is offered before anything is computed. Prefill's own answer is drained and thrown away:
closing its connection would abort it while decode still fetches.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.jobs import RefusalReason
from diptych_engine.adapters import AdapterSettings
from diptych_engine.over_http.addresses import bracketed, http_url
from diptych_engine.over_http.client import EngineHttp
from diptych_engine.over_http.contract import see_version
from diptych_engine.over_http.exposition import totals
from diptych_engine.over_http.liveness import Liveness, until_ready
from diptych_engine.over_http.reading import from_json
from diptych_engine.over_http.salts import Salts
from diptych_engine.port import EngineSpec, Phase, SequenceWork
from diptych_engine.request_port import EngineStats, KvEvent, TokenDelta
from diptych_engine.sglang.answers import Answer, Cursor, read_answer
from diptych_engine.sglang.asking import GENERATE, question, rid
from diptych_engine.sglang.contract import CONTRACT
from diptych_engine.sglang.options import SglangOptions
from diptych_engine.sglang.partner import Partner
from diptych_engine.sglang.rooms import Room, Rooms, from_opaque, see_host, to_opaque

log = logging.getLogger("diptych.engine")

ANSWER_S = 5.0
BOOTSTRAP_PORT = 8998
KEPT_TOKENS = 6
"""Of its context, and of its cache, SGLang uses all but so many: a longer prompt is refused, and an
answer that would go beyond ends some tokens early."""
ROUTE = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
"""503 until all ranks of prefill have registered."""
# What each --disaggregation-mode does.
_PHASES = {"null": {Phase.GENERATE}, "prefill": {Phase.PREFILL}, "decode": {Phase.DECODE}}


class _Info(msgspec.Struct):
    version: str
    model_path: str
    disaggregation_mode: str
    disaggregation_bootstrap_port: int | None = None
    disaggregation_transfer_backend: str = ""
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str = "auto"
    enable_deterministic_inference: bool = False


class SglangEngine:
    """One server.

    Args:
        settings: Where it is, and what it serves.
        options: How it was started.
    """

    def __init__(self, settings: AdapterSettings, options: SglangOptions) -> None:
        if not settings.url:
            raise Permanent("engine 'sglang' needs engine_url: where its server listens")
        if options.prefill_url:
            http_url(options.prefill_url, "prefill_url")
        self._settings = settings
        self._options = options
        self._http = EngineHttp(settings.url, api_key=options.api_key)
        self._bootstrap: EngineHttp | None = None
        self._rooms: Rooms | None = None
        self._partner: Partner | None = None
        self._salts = Salts()
        self._liveness = Liveness(silence_s=options.silence_s, probe_s=options.probe_s)
        self._phases: set[Phase] = set()
        self.spec: EngineSpec = settings.spec(block_tokens=1, dtype="auto")

    async def start(self) -> None:
        """Wait for the server, and for its bootstrap server; see `RequestEngine`."""
        info = await self._info()
        see_version(CONTRACT, info.version)
        if info.disaggregation_transfer_backend == "fake" and info.disaggregation_mode != "null":
            raise Permanent("SGLang's transfer backend `fake` moves no KV")
        self._phases = self._phases_of(info.disaggregation_mode)
        self._describe(info)
        partner_url = self._options.prefill_url
        if Phase.PREFILL in self._phases:
            await self._meet_bootstrap(self._http.url, info.disaggregation_bootstrap_port)
        elif Phase.DECODE in self._phases and partner_url:
            rooms = await self._meet_bootstrap(partner_url, None)
            key = self._options.api_key
            self._partner = Partner(partner_url, api_key=key, rooms=rooms)
            self._phases = self._phases | {Phase.GENERATE}
        log.info("engine_found", extra={"engine": self.spec.engine, "url": self._http.url})

    def _phases_of(self, mode: str) -> set[Phase]:
        """What the server does.

        Raises:
            Permanent: nothing that is known, or nothing of what this worker is for.
        """
        phases, role = _PHASES.get(mode), self._settings.role.value
        if phases is None:
            known = ", ".join(_PHASES)
            raise Permanent(
                f"SGLang's --disaggregation-mode: expected one of {known}, got {mode!r}"
            )
        if mode not in ("null", role):
            raise Permanent(
                f"SGLang's --disaggregation-mode: expected {role} as this worker's role is, or "
                f"null, got {mode}"
            )
        return phases

    async def _info(self) -> _Info:
        async def ask() -> _Info:
            told = await self._http.get("/get_server_info", within_s=ANSWER_S)
            try:
                info: _Info = from_json(told, _Info)
            except msgspec.DecodeError as err:
                raise Permanent(f"{self._http.url} is no SGLang this knows: {err}") from err
            return info

        return await until_ready(ask, within_s=self._options.start_s)

    async def _meet_bootstrap(self, url: str, told_port: int | None) -> Rooms:
        options = self._options
        host = options.bootstrap_host or urlsplit(url).hostname or ""
        see_host(host)
        port = options.bootstrap_port or told_port or BOOTSTRAP_PORT
        self._rooms = rooms = Rooms(host, port)
        self._bootstrap = EngineHttp(f"http://{bracketed(host)}:{port}", setting="bootstrap_host")
        await until_ready(self._see_route, within_s=options.start_s)
        return rooms

    async def _see_route(self) -> None:
        if self._bootstrap is not None:
            await self._bootstrap.get(ROUTE, within_s=ANSWER_S)

    def _describe(self, info: _Info) -> None:
        settings = self._settings
        terms = HandOffTerms(
            kind="sglang_pd",
            engine_version=f"{info.version} {info.model_path}",
            first_token=FirstToken.DECODE,
            pair_up_front=True,
        )
        page, dtype = info.page_size or 1, info.kv_cache_dtype
        context = settings.card.context_tokens
        for most in (info.context_length, info.max_total_num_tokens):
            context = min(context, most or context)
        self.spec = replace(
            self.spec,
            engine=f"sglang {info.version}",
            layout=settings.layout(block_tokens=page, dtype=dtype),
            context_tokens=max(1, context - KEPT_TOKENS),
            kv_tokens=info.max_total_num_tokens or settings.kv_tokens,
            hand_off=None if info.disaggregation_mode == "null" else terms,
            unsupported=() if info.enable_deterministic_inference else ("seed",),
        )

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the prompt and wait until decode has its KV; see `RequestEngine`."""
        self._see_phase(work)
        terms, rooms = self.spec.hand_off, self._rooms
        if terms is None or rooms is None:
            raise Refused(RefusalReason.UNSUPPORTED, "this SGLang has no bootstrap server")
        room = rooms.fresh()
        offer(EngineHandOff(terms=terms, opaque=to_opaque(room)))
        silence_s = self._options.silence_s + self._options.meeting_s
        cached_tokens, ended = None, False
        async with aclosing(self._leg(work, room, silence_s)) as answers:
            async for answer in answers:
                cached_tokens = answer.meta_info.cached_tokens
                ended = ended or answer.meta_info.finish_reason is not None
        if not ended:
            raise EngineGone("SGLang's prefill ended without a reason to finish")
        return TokenDelta((), cached_tokens=cached_tokens)

    async def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """The answer's tokens; see `RequestEngine`."""
        self._see_phase(work)
        room = from_opaque(work.hand_off.opaque) if work.hand_off else None
        if room is not None:
            see_host(room.host)
        elif self._partner is not None:
            room = self._partner.rooms.fresh()
        cursor = Cursor(
            self.spec.eos_ids,
            ignore_eos=work.stopping.ignore_eos,
            logprobs=work.sampling.top_logprobs is not None,
        )
        ended = False
        async with (
            self._partners_leg(work, room),
            aclosing(self._leg(work, room, self._options.silence_s)) as answers,
        ):
            async for answer in answers:
                found = cursor.delta(answer)
                if found is None or ended:
                    continue
                ended = found.finish is not None
                yield found
        if not ended:
            raise EngineGone("SGLang's answer ended without a reason to finish")

    def _partners_leg(
        self, work: SequenceWork, room: Room | None
    ) -> AbstractAsyncContextManager[None]:
        if self._partner is None or work.hand_off is not None:
            return nullcontext()
        silence_s = self._options.silence_s + self._options.meeting_s
        name = rid(work)
        return self._partner.leg(
            self._question(work, room),
            name,
            silence_s=silence_s,
            failed=partial(self._abort, name),
        )

    def _question(self, work: SequenceWork, room: Room | None) -> bytes:
        salt = self._salts.salt(work.tenant) if work.tenant else ""
        return question(work, self.spec.eos_ids, salt, room)

    async def _leg(
        self, work: SequenceWork, room: Room | None, silence_s: float
    ) -> AsyncGenerator[Answer, None]:
        """One server's answer. Left before its end it is aborted, by name and by closing."""
        body = self._question(work, room)
        ended = False
        with self._liveness.asking():
            try:
                async with self._http.events(GENERATE, body, silence_s=silence_s) as events:
                    async for data in events:
                        self._liveness.heard()
                        answer = read_answer(data)
                        ended = answer.meta_info.finish_reason is not None
                        yield answer
            finally:
                if not ended:
                    await self._abort(rid(work))

    async def _abort(self, name: str) -> None:
        body = msgspec.json.encode({"rid": name})
        with suppress(DiptychError):
            await self._http.post("/abort_request", body, within_s=ANSWER_S)

    def _see_phase(self, work: SequenceWork) -> None:
        if work.phase not in self._phases:
            raise Refused(
                RefusalReason.UNSUPPORTED,
                f"this SGLang's --disaggregation-mode does not do {work.phase.value}",
            )

    async def stats(self) -> EngineStats:
        """How full it is; nothing where it runs without `--enable-metrics`."""
        try:
            page = (await self._http.get("/metrics", within_s=ANSWER_S)).decode(errors="replace")
        except Refused:
            return EngineStats()
        numbers = {name: int(value) for name, value in totals(page, "sglang:").items()}
        return EngineStats(
            running=numbers.get("sglang:num_running_reqs"),
            waiting=numbers.get("sglang:num_queue_reqs"),
            kv_tokens_used=numbers.get("sglang:num_used_tokens"),
            pinned_orphans=numbers.get("sglang:num_prefill_inflight_queue_reqs"),
        )

    async def kv_events(self) -> AsyncGenerator[KvEvent, None]:
        """Nothing: what SGLang publishes is not read yet."""
        return
        yield

    async def health(self) -> None:
        """Ask it: an idle one must make a token now and then, a busy one must get on."""
        await self._liveness.check(alive=self._get_model_info, proof=self._make_a_token)
        await self._see_bootstrap()

    async def _get_model_info(self) -> None:
        status = await self._http.status("GET", "/get_model_info", None, within_s=ANSWER_S)
        if status != HTTPStatus.OK:
            raise EngineGone(f"SGLang's server says {status}")

    async def _make_a_token(self) -> None:
        await self._http.get("/health_generate", within_s=ANSWER_S)

    async def _see_bootstrap(self) -> None:
        try:
            await self._see_route()
        except Refused as err:
            raise EngineGone(f"SGLang's bootstrap server: {err}") from err

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
        if self._bootstrap is not None:
            await self._bootstrap.close()
        if self._partner is not None:
            await self._partner.close()


def make(settings: AdapterSettings) -> SglangEngine:
    """The adapter; see `diptych_engine.adapters`."""
    return SglangEngine(settings, settings.options_as(SglangOptions))
