"""The prefill side of a hand-off: reserve, write while computing, hand over."""

import asyncio

import msgspec
from opentelemetry.trace import Span

from diptych_contracts.errors import Incompatible, LinkBroken, Refused
from diptych_contracts.jobs import (
    DecodeJob,
    Generation,
    JobRefused,
    PrefillJob,
    RefusalReason,
)
from diptych_contracts.requests import KvPath
from diptych_contracts.transfers import Reserve
from diptych_engine.port import BlockSink, Engine, NewTokens, Phase, SequenceWork
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.outgoing import LOOK_S, OutgoingTransfer
from diptych_kvlink.outgoing_log import Story
from diptych_kvlink.verifying import context_salt
from diptych_kvlink.writer_links import WriterLinks
from diptych_policy.paths import parking_of
from diptych_telemetry import logger, names, tracer
from diptych_worker.attempts import Attempt
from diptych_worker.decode_peer import LEASE_MARGIN_MS, DecodePeer, check_taken, ticket_of
from diptych_worker.metering import WorkerMetrics
from diptych_worker.taking_over import context_tokens
from diptych_worker.tier_writing import TierFirst
from diptych_worker.tiering import NOTHING, Tiering, TierWork

log = logger("worker")
spans = tracer("worker")

_ENDED: dict[type[BaseException], str] = {asyncio.CancelledError: "cancelled"}
_CLOSING_S = 0.005
_CLOSING_MOST_S = 1.0


class HandOver:
    """Runs the prefill phase of attempts."""

    def __init__(
        self,
        peer: DecodePeer,
        engine: Engine,
        links: WriterLinks,
        *,
        metrics: WorkerMetrics,
        tiering: Tiering | None = None,
    ) -> None:
        self._peer = peer
        self._engine = engine
        self._links = links
        self._metrics = metrics
        self._tiering = tiering
        self._now_s = peer.now_s

    async def run(self, attempt: Attempt, job: PrefillJob) -> None:
        """Prefill, sample one token, and make the decode worker answer for the attempt.

        Raises:
            DiptychError: the hand-off failed; nothing is held on either side.
        """
        with self._links.outgoing.story(
            ticket_of(job.generation), reader=job.decode_worker
        ) as story:
            await self._run(attempt, job, story)

    async def _run(self, attempt: Attempt, job: PrefillJob, story: Story) -> None:
        transfer: OutgoingTransfer | None = None
        handed_over, why = False, ""
        attempt.path = job.path or KvPath.DIS_GPU
        kept = NOTHING
        try:
            transfer = await self._open(attempt, job, story)
            story.opened(transfer)
            if self._tiering is not None:
                kept = await self._tiering.work(attempt)
                transfer.tee = kept.tee
            with spans.start_as_current_span(names.PREFILL_RUN) as span:
                span.set_attribute(names.INPUT_TOKENS, job.generation.prompt_tokens)
                self._engine.submit(_work(attempt, job.generation, transfer, kept))
                news = await _sampled(attempt, transfer)
            if news.finish is None:
                await self._hand_over(attempt, job, transfer, news=news, story=story)
                handed_over = True
        except BaseException as err:
            why = str(err) or _ENDED.get(type(err), type(err).__name__)
            raise
        finally:
            kept.leave()
            if transfer is not None and handed_over:
                transfer.close()
            elif attempt.link:
                await asyncio.shield(self._withdraw(attempt, job, transfer, why))

    async def _withdraw(
        self, attempt: Attempt, job: PrefillJob, transfer: OutgoingTransfer | None, why: str
    ) -> None:
        """Stop computing, stop writing, and only then give the ticket back."""
        self._metrics.not_handed_over(attempt.link)
        if not attempt.left.is_set():
            self._engine.abort(attempt.key)
            await attempt.left.wait()
        writes = transfer is not None and not await self._closed(transfer)
        if transfer is not None and writes:
            # Its reader keeps the slots until the link says that nothing is on its way.
            self._links.give_up(transfer)
        await self._peer.release(job, why, writes=writes)

    async def _closed(self, transfer: OutgoingTransfer) -> bool:
        """Whether nothing writes under its ticket any more; waits a little for it."""
        give_up_s = self._now_s() + _CLOSING_MOST_S
        while not transfer.close():
            if self._now_s() >= give_up_s:
                return False
            await asyncio.sleep(_CLOSING_S)
        return True

    async def _open(self, attempt: Attempt, job: PrefillJob, story: Story) -> OutgoingTransfer:
        """A ticket and its open link: the job's, or the next one if that cannot be opened."""
        link, why = job.link, ""
        for next_link in (job.next_link, job.last_link):
            story.asks(link, until_s=self._now_s() + self._peer.within_s(job), why=why)
            try:
                return await self._open_over(link, attempt, job)
            except (Incompatible, LinkBroken) as err:
                if next_link is None:
                    raise
                why = f"{link} cannot be opened: {err}"
                log.warning(
                    "kv_link_fell_back",
                    request_id=attempt.key.request_id,
                    link=link,
                    next_link=next_link,
                    error=str(err),
                )
            self._metrics.fell_back(link)
            link = next_link
        story.asks(link, until_s=self._now_s() + self._peer.within_s(job), why=why)
        return await self._open_over(link, attempt, job)

    async def _open_over(self, link: str, attempt: Attempt, job: PrefillJob) -> OutgoingTransfer:
        try:
            return await self._ticketed(attempt, job, self._wanted(attempt, job, link))
        except Refused as err:
            if not parking_of(attempt.path) or err.reason != RefusalReason.NO_ROOM:
                raise
            log.info("kv_not_parked", request_id=attempt.key.request_id, error=str(err))
        attempt.path = KvPath.DIS_GPU  # a tier that is full is a miss: is there a seat by now?
        return await self._ticketed(attempt, job, self._wanted(attempt, job, link))

    async def _ticketed(
        self, attempt: Attempt, job: PrefillJob, reserve: Reserve
    ) -> OutgoingTransfer:
        sent_s, link = self._now_s(), reserve.link
        with spans.start_as_current_span(names.KV_RESERVE) as span:
            span.set_attribute(names.LINK, link)
            span.set_attribute(names.LINK_FELL_BACK, link != job.link)
            span.set_attribute(names.KV_PATH, attempt.path)
            span.set_attribute(names.TRANSFER_ID, reserve.transfer_id)
            try:
                ticket = await self._peer.reserve(job, reserve)
            except Refused as err:
                span.set_attribute(names.KV_REFUSED, str(err.reason))
                raise
            attempt.link = link
            span.set_attribute(names.TRANSFER_BLOCKS, len(ticket.slots))
            span.set_attribute(names.HELD_BLOCKS, ticket.held_blocks)
            check_ticket(ticket, reserve, tokens=context_tokens(job.generation))
            salt = context_salt(job.generation, self._engine.spec.fingerprint.base)
            return await self._links.transfer(ticket, sent_s=sent_s, salt=salt)

    def _wanted(self, attempt: Attempt, job: PrefillJob, link: str) -> Reserve:
        generation, spec = job.generation, self._engine.spec
        return Reserve(
            transfer_id=ticket_of(generation),
            generation=generation,
            prefill_worker=self._links.writer,
            link=link,
            layout=spec.layout,
            fingerprint=spec.fingerprint,
            lease_ms=job.first_token_ms + int(self._peer.within_s(job) * 1000) + LEASE_MARGIN_MS,
            certificate=self._links.certificate,
            agent=self._links.agent,
            codec=self._links.codecs.codec(_way(link, job), context_tokens(generation)),
            seals=True,
            leaves_out=True,
            parking=parking_of(attempt.path),
        )

    async def _hand_over(
        self,
        attempt: Attempt,
        job: PrefillJob,
        transfer: OutgoingTransfer,
        *,
        news: NewTokens,
        story: Story,
    ) -> None:
        with spans.start_as_current_span(names.KV_TRANSFER) as span:
            span.set_attribute(names.TRANSFER_ID, transfer.transfer_id)
            span.set_attribute(names.LINK, transfer.kind)
            ended_s = self._now_s()
            within_s = self._peer.within_s(job)
            digests = await transfer.digests(within_s)
            computed_s = transfer.overlap.computed_s or ended_s
            written_s = self._now_s() - computed_s
            n_bytes = sum(digest.n_bytes for digest in digests)
            _describe(span, transfer, n_bytes=n_bytes, blocks=len(digests))
            span.set_attribute(names.KV_PATH, attempt.path)
            story.awaits_answer(until_s=self._now_s() + within_s)
            decode = DecodeJob(
                generation=job.generation,
                prefill_worker=self._links.writer,
                transfer_id=transfer.transfer_id,
                first_ids=news.token_ids,
                first_logprobs=news.logprobs,
                blocks=digests,
                seal=transfer.seal,
                report=msgspec.structs.replace(
                    attempt.report(ended_s),
                    transfer_ms=round(written_s * 1000, 3),
                    transfer_bytes=n_bytes,
                ),
            )
            answer = await self._peer.decode(
                job, decode, within_s=within_s, gone=transfer.reader_is_gone
            )
            remainder_s = self._now_s() - computed_s
            span.set_attribute(names.REMAINDER_MS, round(remainder_s * 1000, 3))
            if isinstance(answer, JobRefused):
                span.set_attribute(names.KV_REFUSED, str(answer.fault or answer.reason))
        check_taken(answer, job)
        story.handed_over(remainder_s=remainder_s)
        self._metrics.handed_over(
            transfer.kind,
            n_bytes,
            moving_s=transfer.moving_s,
            overlap_frac=transfer.overlap.frac,
            took_s=remainder_s,
        )
        self._metrics.blocks_handed_over(sent=transfer.blocks, held=transfer.held_blocks)
        self._metrics.packed(transfer.codec, transfer.raw_bytes, transfer.packing_s)
        self._links.codecs.crossed(_way(transfer.kind, job), n_bytes, transfer.sending_s)


async def _sampled(attempt: Attempt, transfer: OutgoingTransfer) -> NewTokens:
    """The token that ends the prefill; or, raised at once, why its KV cannot be handed over."""
    while not (await asyncio.wait({attempt.sampled}, timeout=LOOK_S))[0]:
        transfer.look()
        if transfer.failure is not None:
            raise transfer.failure
    return await attempt.sampled


def _describe(span: Span, transfer: OutgoingTransfer, *, n_bytes: int, blocks: int) -> None:
    moving_s = transfer.moving_s
    span.set_attributes(
        {
            names.LINK_TLS: transfer.encrypted,
            names.CODEC: transfer.codec,
            names.SEALED: transfer.sealed,
            names.RAW_BYTES: transfer.raw_bytes,
            names.TRANSFER_BYTES: n_bytes,
            names.TRANSFER_BLOCKS: blocks,
            names.HELD_BLOCKS: transfer.held_blocks,
            names.GB_PER_S: round(n_bytes / moving_s / 1e9, 3) if moving_s else 0.0,
            names.OVERLAP_FRAC: round(transfer.overlap.frac, 3),
        }
    )


def _way(link: str, job: PrefillJob) -> str:
    """Which link, and to whom: as fast as it has been."""
    return f"{link} {job.decode_worker}"


def _work(
    attempt: Attempt, generation: Generation, transfer: OutgoingTransfer, kept: TierWork
) -> SequenceWork:
    sink: BlockSink = transfer
    if transfer.held_blocks and kept.tee is not None:
        sink = TierFirst(kept.tee, transfer, transfer.held_blocks)
    return SequenceWork(
        key=attempt.key,
        phase=Phase.PREFILL,
        prompt_ids=attempt.prompt_ids or (),
        answer_ids=generation.prefix_ids,
        sampling=generation.sampling,
        stopping=generation.stopping,
        tenant=generation.tenant,
        sink=sink,
        held_blocks=transfer.held_blocks,
        wanted=kept.wanted if sink is not transfer else (),
        restored=kept.restored,
        on_imported=kept.leave,
    )
