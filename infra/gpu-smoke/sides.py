"""One engine per side, each in a process of its own, and what the smoke test asks of it."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from diptych_contracts.errors import DiptychError
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.adapters import AdapterSettings, make_engine
from diptych_engine.folder_card import card_from_folder
from diptych_engine.port import Phase, SequenceKey, SequenceWork, StepReport
from diptych_engine.request_loop import RequestLoop
from diptych_engine.request_port import RequestEngine


@dataclass(frozen=True, slots=True)
class SideSettings:
    """What a side is started with."""

    role: Role
    model: Path
    gpu: str
    options: dict[str, Any]
    max_sequences: int = 32


class Heard(NamedTuple):
    """One report of an engine, when it was made (the host's monotonic clock), without its costs."""

    at_s: float
    news: tuple[Any, ...]
    blocks_stored: int
    """How many blocks became reusable."""


class NoText:
    """Stands for an answer's text: the test has no stop strings."""

    stopped = False

    def push(self, token_ids: Sequence[int], /) -> str:
        """Nothing to show."""
        return ""


def make_tensorrt_llm(settings: SideSettings) -> RequestEngine:
    """The adapter a worker would use."""
    card = card_from_folder(settings.model, model=settings.model.name)
    return make_engine(
        AdapterSettings(
            name="tensorrt_llm",
            card=card,
            role=settings.role,
            options=settings.options,
            model_path=settings.model,
            kv_tokens=card.context_tokens * settings.max_sequences,
            max_sequences=settings.max_sequences,
        )
    )


def serve(
    line: Connection,
    settings: SideSettings,
    make: Callable[[SideSettings], RequestEngine] = make_tensorrt_llm,
) -> None:
    """Run one engine and obey the other end of `line`, until it says `stop` or hangs up."""
    if settings.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpu
    began_s = time.monotonic()
    try:
        engine = make(settings)
        loop = RequestLoop(engine, lambda stopping: NoText())
        loop.open()
    except DiptychError as err:
        line.send(("failed", str(err)))
        line.close()
        return
    told = features.report() if (features := getattr(engine, "features", None)) else []
    line.send(("ready", (loop.spec.engine, time.monotonic() - began_s, [*told, *_notes(engine)])))

    def listen(report: StepReport) -> None:
        line.send(("heard", Heard(time.monotonic(), tuple(report.news), len(report.blocks_stored))))

    loop.start(listen)
    try:
        while True:
            verb, what = line.recv()
            if verb == "submit":
                loop.submit(what)
            elif verb == "abort":
                loop.abort(what)
            else:
                break
    except EOFError:
        pass
    finally:
        loop.stop()
        with suppress(OSError):  # nobody may be there any more
            line.send(("stopped", None))
        line.close()


def _notes(engine: RequestEngine) -> list[str]:
    return [f"harmlessly unlike the contract: {note}" for note in getattr(engine, "notes", ())]


def work(
    name: str,
    phase: Phase,
    prompt_ids: list[int],
    max_tokens: int,
    *,
    first: tuple[int, ...] = (),
    hand_off: EngineHandOff | None = None,
) -> SequenceWork:
    """Greedy, and past the model's end: answers are as long as they are asked to be."""
    return SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=phase,
        prompt_ids=prompt_ids,
        answer_ids=first,
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
        hand_off=hand_off,
    )
