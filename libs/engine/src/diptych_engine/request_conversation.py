"""What is asked of an engine that schedules by itself, and in what order its answer is told."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from diptych_contracts.errors import Incompatible, Refused, Unverified
from diptych_contracts.handoffs import EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.jobs import RefusalReason
from diptych_engine.port import (
    EngineSpec,
    HandOffReady,
    NewTokens,
    Phase,
    SequenceStarted,
    SequenceWork,
)
from diptych_engine.request_port import RequestEngine, TokenDelta
from diptych_engine.request_seats import Seat
from diptych_engine.sequence import BROKEN
from diptych_engine.turn_reports import TurnReports


class Conversation:
    """Asks an engine for one sequence after another, and tells what comes of it.

    Args:
        engine: Asked.
        reports: Told.
        ready: Waits while nothing that came could be told.
    """

    def __init__(
        self, engine: RequestEngine, reports: TurnReports, ready: Callable[[], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._reports = reports
        self._ready = ready

    async def hold(self, seat: Seat) -> None:
        """Have the engine answer `seat`; returns when it holds nothing of it any more.

        Raises:
            DiptychError: the engine cannot go on with it.
        """
        await self._ready()
        self._reports.tell(SequenceStarted(seat.work.key))
        if seat.work.phase is Phase.PREFILL:
            await self._prefill(seat)
        else:
            await self._answer(seat)

    async def _prefill(self, seat: Seat) -> None:
        offers: list[EngineHandOff] = []
        terms = self._engine.spec.hand_off
        if terms is None:
            raise Refused(RefusalReason.UNSUPPORTED, "this engine hands no KV over")
        up_front = terms.pair_up_front

        def offer(hand_off: EngineHandOff) -> None:
            offers.append(hand_off)
            if up_front and len(offers) == 1 and not seat.aborting:
                self._reports.tell(HandOffReady(seat.work.key, hand_off))

        delta = await self._engine.prefill(seat.work, offer)
        await self._ready()
        if seat.aborting:
            return
        seat.cached_tokens = delta.cached_tokens
        news = seat.sequence.take(delta)
        if news.finish is None:
            _check_offer(offers, news, terms)
            if not up_front:
                self._reports.tell(HandOffReady(seat.work.key, offers[0]))
        self._tell(seat, news)
        seat.told = True

    async def _answer(self, seat: Seat) -> None:
        async with aclosing(self._engine.generate(seat.work)) as stream:
            while not seat.told:
                await self._ready()
                delta = await anext(stream, None)
                if seat.aborting:
                    return
                if delta is None:
                    raise Refused(BROKEN, "the engine's answer broke off")
                self._heard(seat, delta)

    def _heard(self, seat: Seat, delta: TokenDelta) -> None:
        if delta.cached_tokens is not None:
            seat.cached_tokens = delta.cached_tokens
        if not delta.token_ids and delta.finish is None:
            return
        if not seat.heard and seat.work.on_imported is not None:
            seat.work.on_imported()
        news = seat.sequence.take(delta)
        self._tell(seat, news, delta.accepted_drafts)
        seat.told = news.finish is not None

    def _tell(self, seat: Seat, news: NewTokens, accepted_drafts: int = 0) -> None:
        computed = 0
        if not seat.heard and seat.work.phase is not Phase.DECODE:
            known = len(seat.work.prompt_ids) + len(seat.work.answer_ids)
            computed = max(1, known - (seat.cached_tokens or 0))
            news = replace(news, cached_tokens=seat.cached_tokens)
        seat.heard = True
        drafts = min(accepted_drafts, len(news.token_ids))
        self._reports.tell_tokens(news, prompt_tokens=computed, accepted_drafts=drafts)


def check_phase(work: SequenceWork, spec: EngineSpec) -> None:
    """See that an engine of `spec` can begin where `work` is.

    Raises:
        Refused: it moves no KV, or the KV is not its own to fetch.
        Incompatible: an engine of another kind or version offers the KV.
        Unverified: there is no answer token to go on from.
    """
    terms, hand_off = spec.hand_off, work.hand_off
    if work.phase is Phase.GENERATE:
        return
    if terms is None:
        raise Refused(RefusalReason.UNSUPPORTED, f"{spec.engine} hands no KV over")
    if work.phase is Phase.PREFILL:
        return
    if hand_off is None:
        raise Refused(RefusalReason.UNSUPPORTED, f"{spec.engine} fetches KV itself: no hand-off")
    if hand_off.terms != terms:
        theirs, ours = hand_off.terms, terms
        raise Incompatible(f"hand-off terms: {theirs} are offered, {ours} are taken")
    if terms.first_token is FirstToken.PREFILL and not work.answer_ids:
        raise Unverified("there is no answer token to go on from")


def _check_offer(offers: Sequence[EngineHandOff], news: NewTokens, terms: HandOffTerms) -> None:
    expected = 1 if terms.first_token is FirstToken.PREFILL else 0
    if len(offers) != 1 or len(news.token_ids) != expected:
        raise Refused(
            BROKEN,
            f"expected one hand-off and {expected} tokens of a prefill, "
            f"saw {len(offers)} and {len(news.token_ids)}",
        )
