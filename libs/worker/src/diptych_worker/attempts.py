"""One attempt on one worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from diptych_contracts.errors import Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import DecodeJob, GenerateJob, Job, PrefillJob
from diptych_contracts.journal import Report
from diptych_contracts.requests import KvPath, Mode
from diptych_engine.port import NewTokens, Phase, SequenceKey


@dataclass(slots=True)
class Attempt:
    """What a worker knows of an attempt it runs. Times are monotonic, in seconds."""

    job: Job
    worker: Incarnation
    accepted_s: float
    expires_s: float
    prompt_ids: Sequence[int] | None = None
    """The job's prompt, once it is here: until then the engine knows nothing of the attempt."""
    started_s: float | None = None
    first_token_s: float | None = None
    token_s: float | None = None
    """When it last had a token."""
    engine: str = ""
    """Adapter and build of the engine here."""
    cached_tokens: int = 0
    """Leading tokens whose KV was cached here."""
    energy_j: float = 0.0
    energy_source: str = "sim"
    link: str = ""
    """PREFILL: the KV link it holds a ticket for; empty before it has one."""
    verified_s: float = 0.0
    """DECODE: how long it took to verify the KV."""
    path: KvPath = KvPath.DIS_GPU
    """PREFILL: how its KV gets to the decode worker."""
    parked: bool = False
    """DECODE: its KV waits for a seat; the engine knows nothing of it."""
    parked_s: float = 0.0
    """DECODE: how long that took."""
    keep: bool = False
    """DECODE: whether its KV may stay as a cached prefix."""
    remainder_s: float | None = None
    """DECODE: from the end of prefill's compute until decode could begin."""
    sampled: asyncio.Future[NewTokens] = field(default_factory=asyncio.Future)
    """PREFILL: the token that ends it."""
    offered: asyncio.Future[EngineHandOff] = field(default_factory=asyncio.Future)
    """PREFILL, where the engine moves KV itself: what decode needs."""
    untold: bool = False
    """PREFILL whose token is thrown away: decode's counts."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine holds nothing of it any more."""
    failure: Refused | Permanent | None = None
    """Why the engine dropped it."""
    task: asyncio.Task[None] | None = None
    stopping: bool = False
    """It was told to stop: once is enough, twice would break off its clean-up."""

    @property
    def key(self) -> SequenceKey:
        """Its name in the engine."""
        generation = self.job.generation
        return SequenceKey(generation.request_id, generation.attempt)

    @property
    def complete(self) -> bool:
        """PREFILL: whether its token ended the answer."""
        sampled = self.sampled
        if not sampled.done() or sampled.cancelled() or sampled.exception() is not None:
            return False
        return sampled.result().finish is not None

    @property
    def gateway(self) -> Incarnation:
        """Whose journal hears of it."""
        return self.job.generation.gateway

    @property
    def voice(self) -> bytes:
        """What it says there it says with this."""
        return self.job.generation.voice

    @property
    def phase(self) -> Phase:
        """What this worker does of it."""
        match self.job:
            case PrefillJob():
                return Phase.PREFILL
            case DecodeJob():
                return Phase.DECODE
            case GenerateJob():
                return Phase.GENERATE

    def report(self, now_s: float) -> Report:
        """What the attempt has taken up to now, the peer's part included."""
        started_s = now_s if self.started_s is None else self.started_s
        first_s = now_s if self.first_token_s is None else self.first_token_s
        match self.job:
            case PrefillJob(link=link):
                return self._prefilled(Mode.REMOTE, started_s, first_s, link=self.link or link)
            case GenerateJob():
                local = self._prefilled(Mode.LOCAL, started_s, first_s, link="")
                return self._decoded(local, now_s - first_s, self._decode_share(first_s, now_s))
            case DecodeJob(report=handed_over):
                return self._decoded(handed_over, now_s - started_s, share=1.0)

    def _prefilled(self, mode: Mode, started_s: float, first_s: float, *, link: str) -> Report:
        return Report(
            mode=mode,
            prefill_worker=self.worker,
            link=link,
            attempt=self.key.attempt,
            prefill_wait_ms=_ms(started_s - self.accepted_s),
            prefill_ms=_ms(first_s - started_s),
            prefill_j=self.energy_j,
            energy_source=self.energy_source,
            cached_tokens=self.cached_tokens,
            engine=self.engine,
            path=KvPath.COLOCATED if mode is Mode.LOCAL else self.path,
        )

    def _decoded(self, report: Report, decode_s: float, share: float) -> Report:
        decode_j = self.energy_j * share
        local = report.mode == Mode.LOCAL
        return msgspec.structs.replace(
            report,
            decode_worker=self.worker,
            engine=self.engine,
            transfer_ms=report.transfer_ms + _ms(self.verified_s),
            decode_ms=_ms(decode_s),
            parked_ms=_ms(self.parked_s),
            prefill_j=report.prefill_j - decode_j if local else report.prefill_j,
            decode_j=decode_j,
        )

    def _decode_share(self, first_s: float, now_s: float) -> float:
        """How much of a local attempt's energy its decode phase took, by time."""
        started_s = first_s if self.started_s is None else self.started_s
        return (now_s - first_s) / (now_s - started_s) if now_s > started_s else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
