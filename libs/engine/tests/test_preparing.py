"""Grammars through the step loop: made ready beside it, dropped by an abort, failing alone."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Grammar, Sampling, Stopping
from diptych_engine.matching import Grammars, Matcher
from diptych_engine.port import (
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
    StepReport,
)
from diptych_engine.step_loop import StepLoop
from diptych_testkit.structured_list import valid
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import EOS_ID, ToyStepEngine
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

CODEC = TextCodec.from_card(tiny_card())
SCHEMA = {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 4}
WAIT_S = 60.0


class SlowGrammars(Grammars):
    """Waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(CODEC, [EOS_ID])
        self.going_on = threading.Event()
        self.going_on.set()
        self.begun = threading.Event()

    def matcher(self, *args: Any, **more: Any) -> Matcher:
        self.begun.set()
        assert self.going_on.wait(WAIT_S)
        return super().matcher(*args, **more)


class Loop:
    def __init__(self, grammars: Grammars | None) -> None:
        self.crashes: list[BaseException] = []
        self.engine = ToyStepEngine(vocab_size=CODEC.vocab_size)
        self.loop = StepLoop(
            self.engine,
            lambda stopping: AnswerText(CODEC, stopping.stop),
            on_crash=self.crashes.append,
            grammars=grammars,
        )
        self.news: list[Any] = []
        self._heard = threading.Condition()
        self.loop.start(self._hear)

    def _hear(self, report: StepReport) -> None:
        with self._heard:
            self.news += report.news
            self._heard.notify_all()

    def until(self, kind: type, name: str = "r1") -> Any:
        def found() -> Any:
            return next(
                (
                    news
                    for news in self.news
                    if isinstance(news, kind)
                    and news.key.request_id == name
                    and (not isinstance(news, NewTokens) or news.finish)
                ),
                None,
            )

        with self._heard:
            assert self._heard.wait_for(found, WAIT_S), self.news
            return found()

    def tokens(self, name: str = "r1") -> list[int]:
        return [
            token
            for news in self.news
            if isinstance(news, NewTokens) and news.key.request_id == name
            for token in news.token_ids
        ]

    def text(self, name: str = "r1") -> str:
        return b"".join(CODEC.token_bytes(token) for token in self.tokens(name)).decode()


@pytest.fixture
def slow() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
def loop(slow: SlowGrammars) -> Iterator[Loop]:
    made = Loop(slow)
    yield made
    slow.going_on.set()
    made.loop.stop()
    made.loop.check()
    assert not made.crashes


def work(schema: Any = SCHEMA, name: str = "r1", **changes: Any) -> SequenceWork:
    grammar = None if schema is None else Grammar(kind="json_schema", text=json.dumps(schema))
    made = SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=Phase.GENERATE,
        prompt_ids=range(3, 13),
        answer_ids=(),
        sampling=Sampling(temperature=0.0, grammar=grammar),
        stopping=Stopping(max_tokens=60),
    )
    return replace(made, **changes)


def test_an_answer_follows_its_grammar_and_ends_by_it(loop: Loop) -> None:
    loop.loop.submit(work())
    assert loop.until(NewTokens).finish is EndReason.STOP
    assert valid(loop.text(), SCHEMA)


def test_the_grammar_ends_an_answer_that_ignores_the_end_of_text(loop: Loop) -> None:
    loop.loop.submit(work(stopping=Stopping(max_tokens=60, ignore_eos=True)))
    assert loop.until(NewTokens).finish is EndReason.STOP
    assert valid(loop.text(), SCHEMA)


def test_a_stop_string_still_stops(loop: Loop) -> None:
    loop.loop.submit(work(stopping=Stopping(max_tokens=60, stop=(", ",))))
    assert loop.until(NewTokens).finish is EndReason.STOP
    assert loop.text().endswith(", ")
    assert loop.text().count(", ") == 1


def test_what_cannot_end_in_time_is_cut(loop: Loop) -> None:
    loop.loop.submit(work(stopping=Stopping(max_tokens=5)))
    assert loop.until(NewTokens).finish is EndReason.LENGTH
    assert len(loop.tokens()) == 5


def test_an_answer_complete_already_ends_at_once(loop: Loop) -> None:
    whole = CODEC.encode("[3, 3, 3, 3]", add_bos=False)
    loop.loop.submit(work({"const": [3, 3, 3, 3]}, answer_ids=whole))
    end = loop.until(NewTokens)
    assert (end.finish, end.token_ids, end.index) == (EndReason.STOP, (), len(whole))


def test_others_go_on_while_a_grammar_is_made_ready(loop: Loop, slow: SlowGrammars) -> None:
    slow.going_on.clear()
    loop.loop.submit(work())
    assert slow.begun.wait(WAIT_S)
    load = loop.loop.load()
    assert (load.waiting, load.kv_tokens_used) == (1, 70)
    loop.loop.submit(work(None, "r2"))
    assert loop.until(NewTokens, "r2").finish is EndReason.LENGTH
    assert not loop.tokens("r1")
    slow.going_on.set()
    assert loop.until(NewTokens).finish is EndReason.STOP


def test_what_is_aborted_meanwhile_never_begins(loop: Loop, slow: SlowGrammars) -> None:
    slow.going_on.clear()
    loop.loop.submit(work())
    with pytest.raises(ValueError, match="already"):
        loop.loop.submit(work())
    loop.loop.abort(work().key)
    loop.until(SequenceAborted)
    assert loop.loop.load().waiting == 0
    slow.going_on.set()
    loop.loop.submit(work(None, "r2"))
    loop.until(NewTokens, "r2")
    assert not loop.tokens("r1")


def test_a_broken_grammar_ends_its_sequence_alone(loop: Loop) -> None:
    loop.loop.submit(work({"not": {}}))
    loop.loop.submit(work(None, "r2"))
    failed = loop.until(SequenceFailed)
    assert failed.permanent
    assert "not" in failed.detail
    assert loop.until(NewTokens, "r2").finish is EndReason.LENGTH


def test_an_engine_without_grammars_says_so() -> None:
    made = Loop(None)
    made.loop.submit(work())
    failed = made.until(SequenceFailed)
    made.loop.stop()
    assert (failed.permanent, failed.detail) == (True, "this engine follows no grammars")
