"""Embedding: which worker computes, how much one takes on, and what it leaves to generation."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diptych_contracts.fleet import Role, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation

MAX_JOBS = 256
MAX_WAITING_TOKENS = 65_536
"""Of one worker: some 90 s of SmolLM2-135M on one core."""
SHARE = 1 / 3
"""Of an engine's time, while it generates too (`docs/decisions/0012-embeddings.md`)."""
SILENCE_S = 1.5
"""Fifteen reports."""
_NEXT_TO_NOTHING_S = 1e-6
MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0


@dataclass(slots=True)
class Reports:
    """What workers last said of themselves, and who says nothing any more.

    Silence is counted up to the newest report of anybody: while the bus is away nobody is silent.
    Who is taken for dead wrongly is only asked in vain: the work is done elsewhere, once more.
    """

    silence_s: float = SILENCE_S
    _heard: dict[Incarnation, tuple[float, WorkerLoad]] = field(default_factory=dict)
    _newest_s: float = 0.0

    def heard(self, load: WorkerLoad, *, now_s: float) -> None:
        """A report came."""
        self._newest_s = now_s
        self._heard[load.worker] = (now_s, load)

    def forget(self, present: Collection[str]) -> None:
        """Only those `present` can still be asked."""
        for worker in [w for w in self._heard if w not in present and self.silent(w)]:
            del self._heard[worker]

    def silent(self, worker: Incarnation) -> bool:
        """Whether others went on reporting while `worker` did not."""
        known = self._heard.get(worker)
        return known is not None and self._newest_s - known[0] > self.silence_s

    def load(self, worker: Incarnation) -> WorkerLoad | None:
        """The last report."""
        known = self._heard.get(worker)
        return None if known is None else known[1]


def choose(
    offers: Iterable[WorkerRegistration],
    reports: Reports,
    *,
    given: dict[Incarnation, int],
    tried: Collection[Incarnation] = (),
) -> Incarnation | None:
    """The worker for the next texts; None: there is none left to ask.

    A prefill worker before any other, for it is the one whose streams nobody reads; of these the
    one with the fewest tokens before it. Silent and draining ones are not asked; one that has not
    reported yet has nothing to do.

    Args:
        offers: Those who serve the model.
        reports: What they say of themselves.
        given: Tokens this gateway has asked of each, which no report may have yet.
        tried: Those that did not answer.
    """

    def cost(offer: WorkerRegistration) -> tuple[bool, int, str]:
        load = reports.load(offer.worker)
        told = 0 if load is None else load.waiting_tokens + load.embedding_tokens
        waiting = told + given.get(offer.worker, 0)
        return offer.role is not Role.PREFILL, waiting, offer.worker

    able = [offer for offer in offers if offer.worker not in tried and _asked(offer, reports)]
    return min(able, key=cost).worker if able else None


def _asked(offer: WorkerRegistration, reports: Reports) -> bool:
    load = reports.load(offer.worker)
    return not reports.silent(offer.worker) and not (load is not None and load.draining)


@dataclass(slots=True)
class EmbedRoom:
    """What one worker has taken on."""

    max_jobs: int = MAX_JOBS
    max_tokens: int = MAX_WAITING_TOKENS
    jobs: int = 0
    tokens: int = 0
    _tokens_s: float = 0.0
    """Mean pace of late; 0: not known."""

    def enter(self, tokens: int) -> bool:
        """Take `tokens` more, unless that is too much; a single job always fits."""
        if self.jobs and (self.jobs >= self.max_jobs or self.tokens + tokens > self.max_tokens):
            return False
        self.jobs += 1
        self.tokens += tokens
        return True

    def leave(self, tokens: int) -> None:
        """They are done, or nobody waits for them."""
        self.jobs -= 1
        self.tokens -= tokens

    def paced(self, tokens: int, duration_s: float) -> None:
        """Among others, `tokens` took so long from first to last."""
        if duration_s > 0:
            pace = tokens / duration_s
            self._tokens_s = pace if not self._tokens_s else 0.8 * self._tokens_s + 0.2 * pace

    @property
    def retry_after_s(self) -> float:
        """How long what is here takes, within [1, 120]."""
        wait_s = self.tokens / self._tokens_s if self._tokens_s else MIN_RETRY_S
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)


@dataclass(slots=True)
class Spared:
    """Lets embedding have `share` of an engine's time while it generates, and all of it else."""

    share: float = SHARE
    _owed_s: float = 0.0

    def may(self, step_s: float) -> bool:
        """Whether a chunk may be computed after a step that took `step_s`; 0: there was none."""
        if step_s <= 0:
            self._owed_s = 0.0
            return True
        self._owed_s = max(0.0, self._owed_s - step_s)
        return self._owed_s < _NEXT_TO_NOTHING_S

    def computed(self, chunk_s: float) -> None:
        """A chunk took so long: generation gets its part before the next."""
        self._owed_s += chunk_s * (1 - self.share) / self.share
