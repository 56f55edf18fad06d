"""Two engines, each behind a pipe, and answers that go through one or both of them."""

import queue
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import sides

from diptych_engine.port import (
    HandOffReady,
    NewTokens,
    Phase,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
)

ANSWER_S = 60.0
TOKENS = 64


class Failed(Exception):
    """A check did not pass; says why."""


class Side:
    """One engine, from outside."""

    def __init__(self, line: Connection) -> None:
        self.engine, self.start_s = "", 0.0
        self.blocks_stored = 0
        self._lines: list[str] = []
        self._line = line
        self._told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._news: dict[SequenceKey, queue.SimpleQueue[tuple[float, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, deadline_s: float) -> list[str]:
        """Wait until the engine is; gives what it says of itself. Raises Failed."""
        if self.engine:
            return self._lines
        verb, told = self._next("the engine's start", deadline_s)
        if verb != "ready":
            raise Failed(str(told))
        self.engine, self.start_s, self._lines = told
        return self._lines

    def submit(self, work: SequenceWork) -> None:
        """Ask for something."""
        self._news[work.key] = queue.SimpleQueue()
        self._line.send(("submit", work))

    def abort(self, key: SequenceKey) -> None:
        """Have it stopped."""
        self._line.send(("abort", key))

    def news(self, key: SequenceKey, timeout_s: float = ANSWER_S) -> tuple[float, Any]:
        """The next news of a sequence, and when. Raises Failed if it failed or none comes."""
        try:
            at_s, news = self._news[key].get(timeout=timeout_s)
        except queue.Empty:
            raise Failed(f"{key.request_id}: silence for {timeout_s:g} s") from None
        if isinstance(news, SequenceFailed):
            raise Failed(f"{key.request_id}: {news.reason} {news.detail}")
        return at_s, news

    def stop(self) -> None:
        """End it."""
        try:
            self._line.send(("stop", None))
            while self._next("the end", 20.0)[0] not in ("stopped", "failed"):
                pass
        except (OSError, Failed):
            pass

    def _next(self, what: str, timeout_s: float) -> tuple[str, Any]:
        try:
            return self._told.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            raise Failed(f"no sign of {what} in {timeout_s:.0f} s") from None

    def _read(self) -> None:
        try:
            while True:
                verb, told = self._line.recv()
                if verb != "heard":
                    self._told.put((verb, told))
                    continue
                self.blocks_stored += told.blocks_stored
                for news in told.news:
                    self._news[news.key].put((told.at_s, news))
        except (EOFError, OSError):
            self._told.put(("failed", "its process has ended"))
            for waiting in self._news.values():
                gone = SequenceFailed(SequenceKey("-", 0), "engine_gone", "its process has ended")
                waiting.put((time.monotonic(), gone))


@dataclass(slots=True)
class Answer:
    """One answer, and when its parts came."""

    ids: list[int] = field(default_factory=list)
    asked_s: float = 0.0
    first_s: float = 0.0
    offered_s: float = 0.0
    decoded_s: float = 0.0
    ended_s: float = 0.0

    @property
    def gap_ms(self) -> float:
        """Between tokens, decode's alone, on average."""
        return (self.ended_s - self.decoded_s) * 1e3 / max(len(self.ids) - 2, 1)


class Pair:
    """Both sides, and how an answer goes through them."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        self._number = 0

    def alone(self, prompt: list[int], tokens: int = TOKENS) -> Answer:
        """On the decode side only: both phases."""
        asked = sides.work(self._name("alone"), Phase.GENERATE, prompt, tokens)
        answer = Answer(asked_s=time.monotonic())
        self.decode.submit(asked)
        self._rest(asked.key, answer)
        return answer

    def begin(self, prompt: list[int], tokens: int = TOKENS) -> tuple[SequenceWork, Answer]:
        """Prefill, and submit what decode shall do."""
        name = self._name("pair")
        asked = sides.work(name, Phase.PREFILL, prompt, tokens)
        answer = Answer(asked_s=time.monotonic())
        self.prefill.submit(asked)
        offer = None
        while not answer.ids:
            at_s, news = self.prefill.news(asked.key)
            if isinstance(news, HandOffReady):
                offer, answer.offered_s = news.hand_off, at_s
            elif isinstance(news, NewTokens):
                answer.ids, answer.first_s = list(news.token_ids), at_s
        if offer is None:
            raise Failed(f"{name}: prefill gave a token and no hand-off")
        first = tuple(answer.ids)
        work = sides.work(name, Phase.DECODE, prompt, tokens, first=first, hand_off=offer)
        self.decode.submit(work)
        return work, answer

    def handed_over(self, prompt: list[int], tokens: int = TOKENS) -> Answer:
        """Prefill on one side, decode on the other."""
        work, answer = self.begin(prompt, tokens)
        self._rest(work.key, answer)
        return answer

    def _rest(self, key: SequenceKey, answer: Answer) -> None:
        while True:
            at_s, news = self.decode.news(key)
            if not isinstance(news, NewTokens):
                continue
            if news.index != len(answer.ids):
                raise Failed(f"{key.request_id}: token {news.index} came after {len(answer.ids)}")
            answer.decoded_s = answer.decoded_s or at_s
            answer.ids += news.token_ids
            if news.finish is not None:
                answer.ended_s = at_s
                return

    def _name(self, what: str) -> str:
        self._number += 1
        return f"{what}-{self._number}"
