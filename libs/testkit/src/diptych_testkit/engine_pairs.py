"""Two engines that hand over to each other, and all that they say: for the behavioural suite."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from diptych_contracts.handoffs import FirstToken
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    Engine,
    EngineLoad,
    HandOffReady,
    KvBlock,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceStarted,
    SequenceWork,
    StepNews,
    StepReport,
)
from diptych_text.codec import TextCodec

WAIT_S = 200.0
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What of the suite an engine can be asked. What it cannot obey its model card refuses."""

    seeds: bool = True
    """The same seed gives the same answer."""
    logit_bias: bool = True
    logprobs: bool = True
    stays_greedy: bool = True
    """A greedy answer does not depend on who else is there, or where it goes on."""
    prefill_ends: bool = True
    """A prefill whose first token ends the answer needs no decode."""
    crowd: int = 64
    """How many requests at once it is tried with."""
    answer_tokens: int = 24
    """Length of the answers it is tried with."""
    grows_slowly: bool = True
    """An answer of all its context takes long enough to be aborted on its way."""


@dataclass(slots=True)
class EnginePair:
    """Not started yet. The pair may be one engine twice, if that can do both."""

    prefill: Engine
    decode: Engine
    codec: TextCodec
    kill: Callable[[], None] | None = None
    """Ends what is behind both as a crash would; None: it is this process."""
    held: Callable[[], int] | None = None
    """Requests that what is behind them still holds something of, by its own account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """An engine of the suite."""

    name: str
    open: Callable[[], AbstractContextManager[EnginePair]]
    """Opens a pair, and stops both at the end."""
    can: Abilities = field(default_factory=Abilities)
    marker: str = ""
    """Of pytest, for engines that `make test` does not have (`live`, `triton`)."""


class Sink:
    """Keeps KV blocks in memory."""

    def __init__(self, slot_bytes: int, n_tokens: int, block_tokens: int) -> None:
        self._n_tokens, self._size = n_tokens, block_tokens
        self._slots = [bytearray(slot_bytes) for _ in range(-(-n_tokens // block_tokens))]
        self._bytes: dict[int, int] = {}

    def buffer(self, index: int) -> memoryview:
        return memoryview(self._slots[index])

    def written(self, index: int, n_bytes: int) -> None:
        assert index == len(self._bytes), f"block {index} came after {len(self._bytes)}"
        self._bytes[index] = n_bytes

    def blocks(self) -> tuple[KvBlock, ...]:
        """What was written."""
        size = self._size
        return tuple(
            KvBlock(
                i * size,
                min((i + 1) * size, self._n_tokens),
                memoryview(self._slots[i])[:n].toreadonly(),
            )
            for i, n in self._bytes.items()
        )


class Side:
    """One engine, started, and everything it says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reports: list[StepReport] = []
        self.pausing = False
        self._news: dict[SequenceKey, list[StepNews]] = {}
        self._heard = threading.Condition()
        engine.start(self._hear, paused=lambda: self.pausing)

    def _hear(self, report: StepReport) -> None:
        with self._heard:
            self.reports.append(report)
            for news in report.news:
                self._news.setdefault(news.key, []).append(news)
            self._heard.notify_all()

    def said(self, key: SequenceKey) -> list[StepNews]:
        """All news of `key` so far."""
        with self._heard:
            return list(self._news.get(key, ()))

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for what comes with news."""
        with self._heard:
            assert self._heard.wait_for(done, WAIT_S), dict(self._news)

    def first(self, key: SequenceKey, *kinds: type[StepNews]) -> StepNews:
        """The first news of `key` of these kinds; waits for it."""

        def found() -> list[StepNews]:
            return [news for news in self._news.get(key, ()) if isinstance(news, kinds)]

        self.until(lambda: bool(found()))
        return found()[0]

    def end(self, job: SequenceWork) -> StepNews:
        """The news with which `job` leaves; waits for it."""

        def ends() -> list[StepNews]:
            return [n for n in self._news.get(job.key, ()) if _leaves(n, job.phase)]

        self.until(lambda: bool(ends()))
        return ends()[0]

    def tokens(self, job: SequenceWork) -> list[int]:
        """What `job` was answered, checked for gaps and repeats; waits for its end."""
        end = self.end(job)
        assert isinstance(end, NewTokens), end
        return self.so_far(job)

    def so_far(self, job: SequenceWork) -> list[int]:
        """What `job` was answered until now; checks order, places and that nothing follows."""
        said = self.said(job.key)
        new = [news for news in said if isinstance(news, NewTokens)]
        if any(news.token_ids for news in new):
            assert [isinstance(n, SequenceStarted) for n in said].index(True) < said.index(new[0])
        ids: list[int] = []
        for news in new:
            assert news.index == len(job.answer_ids) + len(ids), (news, ids)
            ids += news.token_ids
        assert not [n for n in new[:-1] if n.finish], "something was said after the end"
        return ids

    def finish(self, job: SequenceWork) -> EndReason | None:
        """Why `job` ended; waits for it."""
        end = self.end(job)
        assert isinstance(end, NewTokens), end
        return end.finish

    def failure(self, job: SequenceWork) -> SequenceFailed:
        """How `job` failed; waits for it."""
        end = self.end(job)
        assert isinstance(end, SequenceFailed), end
        return end

    def is_empty(self) -> None:
        """See that nothing is held; waits for engines that let go by and by."""

        def empty() -> bool:
            load = self.engine.load()
            ours = load.kv_tokens_used if self.engine.spec.hand_off is None else 0
            nothing = EngineLoad(0, 0, 0, load.kv_tokens_used, recomputed=load.recomputed)
            return load == nothing and not ours

        eventually(empty, lambda: f"held after the end: {self.engine.load()}")


def eventually(done: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait until `done`; it is asked again and again."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if done():
            return
        pause.wait(0.02)
    raise AssertionError(otherwise())


def _leaves(news: StepNews, phase: Phase) -> bool:
    if isinstance(news, NewTokens):
        return news.finish is not None or phase is Phase.PREFILL
    return isinstance(news, SequenceFailed | SequenceAborted)


class Duo:
    """Both sides of a pair, started."""

    def __init__(self, pair: EnginePair) -> None:
        self.pair = pair
        self.prefill = Side(pair.prefill)
        self.decode = self.prefill if pair.decode is pair.prefill else Side(pair.decode)
        self.codec = pair.codec
        self._asked = 0

    def work(
        self,
        prompt_ids: Sequence[int],
        *,
        stopping: Stopping,
        sampling: Sampling = GREEDY,
        answer_ids: Sequence[int] = (),
    ) -> SequenceWork:
        """A fresh request for an answer in one piece."""
        self._asked += 1
        return SequenceWork(
            key=SequenceKey(RequestId(f"suite-{self._asked}"), 1),
            phase=Phase.GENERATE,
            prompt_ids=tuple(prompt_ids),
            answer_ids=tuple(answer_ids),
            sampling=sampling,
            stopping=stopping,
            tenant="suite",
        )

    def ask(self, job: SequenceWork) -> list[int]:
        """The decode side's own answer to `job`."""
        self.decode.engine.submit(job)
        return self.decode.tokens(job)

    def begin(self, job: SequenceWork) -> tuple[SequenceWork, list[int]]:
        """Have `job` prefilled; gives what is left to ask, and the tokens that came.

        With an engine that pairs up front the prefill goes on until its other leg is asked.
        """
        rest, ids = self._hand_over(job)
        assert rest is not None, "the answer was complete with its first token"
        return rest, ids

    def _hand_over(self, job: SequenceWork) -> tuple[SequenceWork | None, list[int]]:
        leg, sink = self.prefill_leg(job)
        side = self.prefill
        side.engine.submit(leg)
        terms = side.engine.spec.hand_off
        if terms is None:
            ids = side.tokens(leg)
            if side.finish(leg) is not None:
                return None, ids
            assert sink is not None
            rest = replace(job, phase=Phase.DECODE, answer_ids=(*job.answer_ids, *ids))
            return replace(rest, blocks=sink.blocks()), ids
        ready = side.first(leg.key, HandOffReady, NewTokens, SequenceFailed)
        if isinstance(ready, NewTokens):
            assert ready.finish is not None, "the first token came before the hand-off"
            return None, side.so_far(leg)
        assert isinstance(ready, HandOffReady), ready
        assert ready.hand_off.terms == terms
        ids = [] if terms.pair_up_front else side.tokens(leg)
        assert len(ids) == (1 if terms.first_token is FirstToken.PREFILL else 0)
        rest = replace(job, phase=Phase.DECODE, answer_ids=(*job.answer_ids, *ids))
        return replace(rest, hand_off=ready.hand_off), ids

    def prefill_leg(self, job: SequenceWork) -> tuple[SequenceWork, Sink | None]:
        """What the prefill side is asked for `job`, and where its blocks go, if they are ours."""
        key = job.key if self.prefill is not self.decode else self._other(job.key)
        spec = self.prefill.engine.spec
        sink = None
        if spec.hand_off is None:
            known = len(job.prompt_ids) + len(job.answer_ids)
            sink = Sink(spec.layout.slot_bytes, known, spec.layout.block_tokens)
        return replace(job, key=key, phase=Phase.PREFILL, sink=sink), sink

    def _other(self, key: SequenceKey) -> SequenceKey:
        return SequenceKey(RequestId(f"{key.request_id}-prefill"), key.attempt)

    def hand_over(self, job: SequenceWork) -> list[int]:
        """The answer to `job`, begun on one side and ended on the other."""
        rest, ids = self._hand_over(job)
        if rest is not None:
            self.decode.engine.submit(rest)
            ids += self.decode.tokens(rest)
        return ids

    def is_empty(self) -> None:
        """See that nothing is held on either side, by nobody's account."""
        self.prefill.is_empty()
        self.decode.is_empty()
        held = self.pair.held
        if held is not None:
            eventually(lambda: held() == 0, lambda: f"{held()} are still held")
