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
from pathlib import Path

import sides
from pairs import ANSWER_S, TOKENS, Answer, Failed, Pair, Side

from diptych_contracts.errors import DiptychError
from diptych_contracts.fleet import Role
from diptych_engine.folder_card import card_from_folder
from diptych_engine.port import NewTokens, SequenceAborted
from diptych_text.codec import TextCodec

LIMIT_S = 300.0
CROWD = 16
ABORT_S = 15.0
TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Write a long story about the sea and the people who live by it. ",
    "A list of prime numbers: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, ",
)
LONG = 40
"""How often a text is said for the long prompt: more than a block of any engine's KV."""


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
