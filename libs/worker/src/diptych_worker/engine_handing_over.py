"""The prefill side of a hand-off whose KV the engines move themselves.

    reserve a seat → submit PREFILL → `HandOffReady` → first token → DecodeJob
    reserve a seat → submit PREFILL → `HandOffReady` → DecodeJob → prefill's end

The second where the terms say `pair_up_front`: both legs run at once, this one is kept open to its
end, and where either fails, its worker's word ends the attempt and the scheduler cancels the other.
What prefill's engine has offered and nobody took it keeps for `HandOffTerms.orphan_ms`: it is
counted as an orphan.
"""

import asyncio

from diptych_contracts.errors import Refused
from diptych_contracts.handoffs import LINK, EngineHandOff, FirstToken, HandOffTerms
from diptych_contracts.jobs import DecodeJob, PrefillJob, RefusalReason
from diptych_contracts.transfers import Reserve, Ticket
from diptych_engine.port import Engine, Phase, SequenceWork
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.outgoing_log import OutgoingLog, Story
from diptych_telemetry import names, tracer
from diptych_worker.attempts import Attempt
from diptych_worker.decode_peer import LEASE_MARGIN_MS, DecodePeer, check_taken, ticket_of
from diptych_worker.metering import WorkerMetrics
from diptych_worker.orphaned import Orphans
from diptych_worker.taking_over import context_tokens

spans = tracer("worker")


class EngineHandOver:
    """Runs the prefill phase of attempts."""

    def __init__(
        self,
        peer: DecodePeer,
        engine: Engine,
        terms: HandOffTerms,
        *,
        outgoing: OutgoingLog,
        metrics: WorkerMetrics,
        orphans: Orphans,
    ) -> None:
        self._peer = peer
        self._engine = engine
        self._terms = terms
        self._outgoing = outgoing
        self._worker = outgoing.writer
        self._metrics = metrics
        self._orphans = orphans
        self._now_s = peer.now_s

    async def run(self, attempt: Attempt, job: PrefillJob) -> None:
        """Prefill, and make the decode worker answer for the attempt.

        Raises:
            DiptychError: the hand-off failed; nothing is held on either side, but what prefill's
                engine keeps of an orphan.
        """
        if job.link != LINK:
            raise Refused(RefusalReason.UNSUPPORTED, f"link {job.link!r}; expected {LINK!r}")
        attempt.untold = self._terms.first_token is FirstToken.DECODE
        with self._outgoing.story(ticket_of(job.generation), reader=job.decode_worker) as story:
            await self._run(attempt, job, story)

    async def _run(self, attempt: Attempt, job: PrefillJob, story: Story) -> None:
        taken = False
        try:
            story.asks(LINK, until_s=self._now_s() + self._within_s(job))
            sent_s = self._now_s()
            ticket = await self._reserve(attempt, job)
            story.reserved(until_s=sent_s + ticket.lease_ms / 1000)
            with spans.start_as_current_span(names.PREFILL_RUN) as span:
                span.set_attribute(names.INPUT_TOKENS, job.generation.prompt_tokens)
                self._engine.submit(_work(attempt))
                if not self._terms.pair_up_front:
                    await attempt.sampled
                offer = await _offered(attempt)
            if offer is not None:
                await self._hand_over(attempt, job, ticket, offer=offer, story=story)
                taken = True
                await attempt.sampled
        finally:
            if attempt.link and not (taken and attempt.left.is_set()):
                await asyncio.shield(self._withdraw(attempt, job, taken=taken))

    async def _reserve(self, attempt: Attempt, job: PrefillJob) -> Ticket:
        generation, spec = job.generation, self._engine.spec
        within_ms = int(self._within_s(job) * 1000)
        reserve = Reserve(
            transfer_id=ticket_of(generation),
            generation=generation,
            prefill_worker=self._worker,
            link=LINK,
            layout=spec.layout,
            fingerprint=spec.fingerprint,
            lease_ms=job.first_token_ms + within_ms + LEASE_MARGIN_MS,
            hand_off=self._terms,
        )
        with spans.start_as_current_span(names.KV_RESERVE) as span:
            span.set_attribute(names.LINK, LINK)
            try:
                ticket = await self._peer.reserve(job, reserve)
            except Refused as err:
                span.set_attribute(names.KV_REFUSED, str(err.reason))
                raise
            attempt.link = LINK
            check_ticket(ticket, reserve, tokens=context_tokens(generation))
        return ticket

    async def _hand_over(
        self,
        attempt: Attempt,
        job: PrefillJob,
        ticket: Ticket,
        *,
        offer: EngineHandOff,
        story: Story,
    ) -> None:
        began_s = self._now_s()
        story.awaits_answer(until_s=began_s + self._within_s(job))
        first = None if self._terms.pair_up_front else attempt.sampled.result()
        decode = DecodeJob(
            generation=job.generation,
            prefill_worker=self._worker,
            transfer_id=ticket.transfer_id,
            first_ids=first.token_ids if first is not None else (),
            first_logprobs=first.logprobs if first is not None else (),
            blocks=(),
            report=attempt.report(began_s),
            seal=ticket.seal,
            hand_off=offer,
        )
        with spans.start_as_current_span(names.KV_TRANSFER) as span:
            span.set_attribute(names.LINK, LINK)
            span.set_attribute(names.TRANSFER_ID, ticket.transfer_id)
            answer = await self._peer.decode(job, decode, within_s=self._within_s(job))
        check_taken(answer, job)
        took_s = self._now_s() - began_s
        story.handed_over(remainder_s=took_s)
        self._metrics.handed_over(LINK, 0, moving_s=0.0, overlap_frac=0.0, took_s=took_s)

    async def _withdraw(self, attempt: Attempt, job: PrefillJob, *, taken: bool) -> None:
        """Stop computing, and give the ticket back if its holder does not have the job."""
        if not attempt.left.is_set():
            self._engine.abort(attempt.key)
            await attempt.left.wait()
        if taken:
            return
        if attempt.offered.done() and not attempt.complete:
            self._orphans.add(self._terms.orphan_ms / 1000)
        self._metrics.not_handed_over(LINK)
        why = "" if attempt.complete else "not handed over"
        await self._peer.release(job, why, writes=False)

    def _within_s(self, job: PrefillJob) -> float:
        """How long decode may take to answer: never longer than prefill's engine keeps the KV."""
        orphan_s = self._terms.orphan_ms / 1000 or float("inf")
        return min(self._peer.within_s(job), orphan_s)


async def _offered(attempt: Attempt) -> EngineHandOff | None:
    """What decode needs; None: the answer is complete, and needs no decode.

    Raises:
        DiptychError: why the engine gave the attempt up.
        Refused: it ended without offering anything.
    """
    waiting = (attempt.offered, attempt.sampled)
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if attempt.failure is not None:
        raise attempt.failure
    if attempt.complete:
        return None
    if not attempt.offered.done():
        text = "the engine has computed the prompt and offers no hand-off"
        raise Refused(RefusalReason.UNSUPPORTED, text)
    return attempt.offered.result()


def _work(attempt: Attempt) -> SequenceWork:
    generation = attempt.job.generation
    return SequenceWork(
        key=attempt.key,
        phase=Phase.PREFILL,
        prompt_ids=attempt.prompt_ids or (),
        answer_ids=generation.prefix_ids,
        sampling=generation.sampling,
        stopping=generation.stopping,
        tenant=generation.tenant,
    )
