"""Says whether disaggregated serving on TensorRT-LLM works here, in five minutes.

    infra/gpu-smoke/run --model FOLDER

Two processes, one engine each (prefill, decode), Diptych's adapter and loop, no bus: KV goes by the
engine's own transceiver. Prints a report to paste; the exit code is 0 if every check passed.
"""

import argparse
import multiprocessing
import platform
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sides

from diptych_contracts.errors import DiptychError
from diptych_contracts.fleet import Role
from diptych_engine.folder_card import card_from_folder
from diptych_engine.port import (
    HandOffReady,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
)
from diptych_text.codec import TextCodec

LIMIT_S = 300.0
ANSWER_S = 60.0
TOKENS = 64
CROWD = 16
ABORT_S = 15.0
TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Write a long story about the sea and the people who live by it. ",
    "A list of prime numbers: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, ",
)
LONG = 40
"""How often a text is said for the long prompt: more than a block of any engine's KV."""


class Failed(Exception):
    """A check did not pass; says why."""


@dataclass(slots=True)
class Report:
    """What is printed at the end."""

    facts: list[str] = field(default_factory=list)
    checks: list[tuple[str, str, str]] = field(default_factory=list)

    def check(self, name: str, run: Callable[[], str]) -> bool:
        """Run a check; whatever goes wrong in it is its result."""
        try:
            self.checks.append(("ok", name, run()))
            return True
        except Failed as err:
            self.checks.append(("FAILED", name, str(err)))
            return False

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return bool(self.checks) and all(verdict == "ok" for verdict, _, _ in self.checks)

    def text(self) -> str:
        """As it is pasted."""
        lines = ["", "----- diptych gpu-smoke: paste from here -----", *self.facts, ""]
        lines += [f"{verdict:<7} {name}: {told}" for verdict, name, told in self.checks]
        verdict = "PASSED" if self.passed else "FAILED"
        return "\n".join([*lines, "", f"{verdict}", "----- to here -----"])


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


def equality(pair: Pair, prompts: list[list[int]]) -> str:
    """Greedy answers of one engine and of two are the same tokens."""
    wholes = [pair.alone(prompt) for prompt in prompts]
    for number, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        parts = pair.handed_over(prompt)
        if parts.ids != whole.ids:
            same = sum(1 for _ in _common(parts.ids, whole.ids))
            raise Failed(
                f"prompt {number} of {len(prompt)} tokens: equal up to token {same}, then "
                f"{parts.ids[same : same + 4]} in place of {whole.ids[same : same + 4]}"
            )
    return f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens"


def _common(left: list[int], right: list[int]) -> Iterator[int]:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return
        yield one


def timings(pair: Pair, prompt: list[int]) -> str:
    """What a hand-off costs beside the same answer of one engine."""
    apart = [pair.handed_over(prompt) for _ in range(5)]
    whole = [pair.alone(prompt) for _ in range(5)]

    def median(figures: Iterator[float]) -> str:
        return f"{statistics.median(figures):.1f} ms"

    return (
        f"medians of 5, {len(prompt)} prompt tokens: first token "
        f"{median((a.first_s - a.asked_s) * 1e3 for a in apart)} (alone "
        f"{median((a.decoded_s - a.asked_s) * 1e3 for a in whole)}); offer to decode's first token "
        f"{median((a.decoded_s - a.offered_s) * 1e3 for a in apart)}; per token "
        f"{median(a.gap_ms for a in apart)} (alone {median(a.gap_ms for a in whole)})"
    )


def events(pair: Pair, deadline_s: float = 10.0) -> str:
    """KV events of both engines have come."""
    give_up_s = time.monotonic() + deadline_s
    while not (pair.prefill.blocks_stored and pair.decode.blocks_stored):
        if time.monotonic() > give_up_s:
            seen = f"prefill {pair.prefill.blocks_stored}, decode {pair.decode.blocks_stored}"
            raise Failed(f"reusable blocks told of: {seen}")
        time.sleep(0.05)
    return (
        f"blocks told of: prefill {pair.prefill.blocks_stored}, decode {pair.decode.blocks_stored}"
    )


def aborts(pair: Pair, prompt: list[int]) -> str:
    """Aborted in mid-answer and before decode's first token; then all is as before."""
    took = []
    for wait in (4, 0):
        work, _ = pair.begin(prompt, 512)
        seen = 0
        while seen < wait:
            news = pair.decode.news(work.key)[1]
            seen += len(news.token_ids) if isinstance(news, NewTokens) else 0
        began_s = time.monotonic()
        pair.decode.abort(work.key)
        while not isinstance(pair.decode.news(work.key, ABORT_S)[1], SequenceAborted):
            pass
        took.append(time.monotonic() - began_s)
    if pair.handed_over(prompt).ids != pair.alone(prompt).ids:
        raise Failed("after the aborts answers are no longer equal")
    return f"while decoding {took[0] * 1e3:.0f} ms, before the first token {took[1] * 1e3:.0f} ms"


def crowd(pair: Pair, prompt: list[int]) -> str:
    """Many hand-offs at once."""
    began_s = time.monotonic()
    outcomes: queue.SimpleQueue[Answer | Failed] = queue.SimpleQueue()

    def one(number: int) -> None:
        try:
            outcomes.put(pair.handed_over([*prompt, number + 5]))
        except Failed as err:
            outcomes.put(err)

    threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(CROWD)]
    for thread in threads:
        thread.start()
    tokens = 0
    for _ in threads:
        try:
            outcome = outcomes.get(timeout=2 * ANSWER_S)
        except queue.Empty:
            raise Failed(f"silence for {2 * ANSWER_S:g} s") from None
        if isinstance(outcome, Failed):
            raise outcome
        tokens += len(outcome.ids)
    if tokens != CROWD * TOKENS:
        raise Failed(f"expected {CROWD * TOKENS} tokens, got {tokens}")
    return f"{CROWD} at once, {tokens / (time.monotonic() - began_s):.0f} tokens/s"


def examine(pair: Pair, prompts: list[list[int]], report: Report, give_up_s: float) -> None:
    """Every check, until the time is over."""
    long = max(prompts, key=len)
    wanted: list[tuple[str, Callable[[], str]]] = [
        ("greedy answers are those of one engine", lambda: equality(pair, prompts)),
        ("KV events", lambda: events(pair)),
        ("abort", lambda: aborts(pair, prompts[0])),
        ("hand-offs at once", lambda: crowd(pair, long)),
        ("timings", lambda: timings(pair, long)),
    ]
    for name, check in wanted:
        if time.monotonic() > give_up_s:
            report.checks.append(("FAILED", name, "not run: the time was over"))
        else:
            report.check(name, check)


def facts(model: str, gpus: list[str]) -> list[str]:
    """Of this machine."""
    asked = ("--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader")
    try:
        done = subprocess.run(
            ["nvidia-smi", *asked], capture_output=True, text=True, timeout=20, check=False
        )
        found = done.stdout.strip().splitlines() or [done.stderr.strip()]
    except (OSError, subprocess.TimeoutExpired) as err:
        found = [f"nvidia-smi: {err}"]
    return [
        f"model {model}; prefill on GPU {gpus[0]}, decode on GPU {gpus[-1]}",
        *(f"GPU {line}" for line in found),
        f"Python {platform.python_version()}, {platform.platform()}",
    ]


@contextmanager
def processes(arguments: argparse.Namespace) -> Iterator[tuple[Side, Side]]:
    """Both engines, each in a fresh process, which ends with this."""
    context = multiprocessing.get_context("spawn")
    gpus, running, made = arguments.gpus.split(","), [], []
    fraction = 0.4 if len(gpus) == 1 else 0.8
    for role, gpu in ((Role.PREFILL, gpus[0]), (Role.DECODE, gpus[-1])):
        ours, theirs = context.Pipe()
        options = {"kv_memory_frac": fraction, "transceiver": arguments.transceiver}
        settings = sides.SideSettings(role, arguments.model, gpu, options)
        process = context.Process(target=sides.serve, args=(theirs, settings))
        process.start()
        theirs.close()
        running.append(process)
        made.append(Side(ours))
        if len(gpus) == 1:
            made[-1].ready(LIMIT_S)  # each takes its part of the memory that is then free
    try:
        yield made[0], made[1]
    finally:
        for side in made:
            side.stop()
        for process in running:
            process.join(10.0)
            if process.is_alive():
                process.kill()


def prompts_of(model: Path) -> list[list[int]]:
    """Short ones and a long one, by the model's own tokenizer."""
    codec = TextCodec.from_card(card_from_folder(model, model=model.name))
    return [codec.encode(text) for text in (*TEXTS, TEXTS[1] * LONG)]


def run(arguments: argparse.Namespace) -> Report:
    """Start, examine, stop."""
    report, give_up_s = Report(), time.monotonic() + LIMIT_S
    report.facts += facts(arguments.model.name, arguments.gpus.split(","))
    try:
        prompts = prompts_of(arguments.model)
        with processes(arguments) as (prefill, decode):
            told = [side.ready(give_up_s - time.monotonic()) for side in (prefill, decode)]
            report.facts += [f"engine {decode.engine}", *told[1]]
            started = f"prefill {prefill.start_s:.0f} s, decode {decode.start_s:.0f} s"
            report.checks.append(("ok", "both engines start", started))
            examine(Pair(prefill, decode), prompts, report, give_up_s)
    except (Failed, DiptychError) as err:
        report.checks.append(("FAILED", "both engines start", str(err)))
    return report


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder in Hugging Face's form")
    parser.add_argument("--gpus", default="0,1", help="0,1 (prefill, decode), or one for both")
    parser.add_argument("--transceiver", default="NIXL", choices=["NIXL", "UCX", "DEFAULT"])
    report = run(parser.parse_args(arguments))
    sys.stdout.write(report.text() + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
