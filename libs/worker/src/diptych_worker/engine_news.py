"""From engine steps to journal entries: one frame per step and gateway."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diptych_bus.port import Journal
from diptych_contracts.errors import DiptychError, Incompatible, Permanent, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import AttemptFailed, End, TokenEntry, TokenFrame
from diptych_engine.port import (
    HandOffReady,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceStarted,
    StepReport,
)
from diptych_telemetry import logger
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.attempts import Attempt
from diptych_worker.device import Device
from diptych_worker.metering import WorkerMetrics
from diptych_worker.tiering import Tiering

log = logger("worker")


class EngineNews:
    """Hears every step, on the event loop; `attempts` are those the engine may hold."""

    def __init__(  # noqa: PLR0913 - all that hears of a step
        self,
        journal: Journal,
        worker: Incarnation,
        device: Device,
        metrics: WorkerMetrics,
        *,
        blocks: AnnouncedBlocks,
        now_s: Callable[[], float],
        tiering: Tiering | None = None,
    ) -> None:
        self._journal = journal
        self._blocks = blocks
        self._worker = worker
        self._device = device
        self._metrics = metrics
        self._now_s = now_s
        self._tiering = tiering
        self._loop = asyncio.get_running_loop()
        self.attempts: dict[SequenceKey, Attempt] = {}

    def heard(self, report: StepReport) -> None:
        """A step is done. Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._on_step, report)

    def unheard(self) -> bool:
        """Whether the ring of un-acknowledged entries is full (the bus is away).

        The engine pauses meanwhile: tokens are neither dropped nor piled up.
        """
        return self._journal.ring_full

    def fail(self, attempt: Attempt, err: DiptychError) -> None:
        """Tell the owner that `attempt` cannot go on here; it knows of its own cancels."""
        refused = err if isinstance(err, Refused) else Refused(type(err).__name__, str(err))
        if refused.reason == RefusalReason.CANCELLED:
            return
        log.warning("attempt_failed", request_id=attempt.key.request_id, error=str(refused))
        failed = AttemptFailed(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            worker=Incarnation(refused.by or self._worker),
            reason=refused.reason,
            detail=str(err),
            retryable=not _never_works(err),
            voice=attempt.voice,
        )
        self._journal.append(attempt.gateway, failed)

    def _on_step(self, report: StepReport) -> None:
        self._charge(report)
        self._metrics.step(report)
        if self._tiering is not None:
            self._tiering.heard(report)
        self._blocks.changed(stored=report.blocks_stored, removed=report.blocks_removed)
        entries: dict[Incarnation, list[TokenEntry]] = defaultdict(list)
        ends: dict[Incarnation, list[End]] = defaultdict(list)
        for news in report.news:
            attempt = self.attempts.get(news.key)
            if attempt is None:
                continue
            if not isinstance(news, NewTokens):
                self._hear(attempt, news)
                continue
            if attempt.untold and news.finish is None:
                news = replace(news, token_ids=(), logprobs=())
            if news.cached_tokens is not None:
                self._note_cached(attempt, news.cached_tokens)
            if news.token_ids:
                entries[attempt.gateway].append(_entry(news, attempt.voice))
            end = self._take_tokens(attempt, news)
            if end is not None:
                ends[attempt.gateway].append(end)
        for gateway in dict.fromkeys((*entries, *ends)):
            frame = TokenFrame(
                worker=self._worker, entries=tuple(entries[gateway]), ends=tuple(ends[gateway])
            )
            self._journal.append(gateway, frame)

    def _hear(
        self,
        attempt: Attempt,
        news: SequenceStarted | SequenceFailed | SequenceAborted | HandOffReady,
    ) -> None:
        match news:
            case SequenceStarted():
                attempt.started_s = self._now_s()
                attempt.cached_tokens = news.cached_tokens
                self._metrics.started(attempt)
            case HandOffReady():
                if not attempt.offered.done():
                    attempt.offered.set_result(news.hand_off)
            case SequenceFailed():
                self._drop(attempt, news.reason, news.detail, permanent=news.permanent)
            case SequenceAborted():
                self._drop(attempt, RefusalReason.CANCELLED, "stopped")

    def _note_cached(self, attempt: Attempt, tokens: int) -> None:
        """An engine says only with its first output what it had cached."""
        if attempt.phase is not Phase.DECODE:
            self._metrics.cached(tokens - attempt.cached_tokens)
            attempt.cached_tokens = tokens

    def _charge(self, report: StepReport) -> None:
        """Split the step's energy by the tokens computed for each sequence."""
        energy_j = self._device.step_energy_j(
            report.duration_s,
            prefill_tokens=report.prefill_tokens,
            decode_tokens=report.decode_tokens,
        )
        total = sum(report.tokens_by_key.values())
        for key, tokens in report.tokens_by_key.items():
            attempt = self.attempts.get(key)
            if attempt is not None:
                attempt.energy_j += energy_j * tokens / total

    def _take_tokens(self, attempt: Attempt, news: NewTokens) -> End | None:
        now_s = self._now_s()
        if attempt.first_token_s is None:
            attempt.first_token_s = now_s
        if news.token_ids:
            self._metrics.tokens(attempt, len(news.token_ids), now_s)
            attempt.token_s = now_s
        if not attempt.sampled.done():
            attempt.sampled.set_result(news)
        if news.finish is None:
            if attempt.phase is Phase.PREFILL:
                self._leave(attempt)
            return None
        self._leave(attempt)
        return End(
            request_id=news.key.request_id,
            attempt=news.key.attempt,
            reason=news.finish,
            tokens=news.index + len(news.token_ids),
            report=attempt.report(now_s),
            voice=attempt.voice,
        )

    def _drop(self, attempt: Attempt, reason: str, detail: str, *, permanent: bool = False) -> None:
        """The engine holds nothing of `attempt` any more, and no end was reached."""
        why = Refused(reason, detail)
        attempt.failure = Permanent(str(why)) if permanent else why
        waited_for: tuple[asyncio.Future[Any], ...] = (attempt.sampled, attempt.offered)
        for future in waited_for:
            if not future.done():
                future.set_exception(attempt.failure)
                future.exception()  # seen, even if nobody waits
        self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        del self.attempts[attempt.key]
        attempt.left.set()
        self._metrics.ended(attempt, self._now_s())


def _never_works(err: DiptychError) -> bool:
    """Whether another worker would fail too; one that matches its peer may not."""
    return isinstance(err, Permanent) and not isinstance(err, Incompatible)


def _entry(news: NewTokens, voice: bytes) -> TokenEntry:
    return TokenEntry(
        request_id=news.key.request_id,
        attempt=news.key.attempt,
        index=news.index,
        token_ids=news.token_ids,
        logprobs=news.logprobs,
        voice=voice,
    )
