"""What both served models have in common: an engine, requests in progress, and their ends."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton_python_backend_utils as pb

from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling
from diptych_engine.port import (
    NewTokens,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceWork,
    StepReport,
)
from diptych_testkit.triton_models.cpu_engine import card_of, engine_of, parameters_of

CHECK_S = 0.02
"""How often is looked for cancelled requests (`cancellation_check_period_ms` of the real one)."""
FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass
class Live:
    """A request in progress."""

    request: Any
    sender: Any
    work: SequenceWork | None = None
    tokens: list[int] = field(default_factory=list)
    over: bool = False
    # After its final response a request must not be touched: the server has freed it.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, tensors: Sequence[Any], *, final: bool) -> None:
        with self.lock:
            self.over = final
            self.sender.send(pb.InferenceResponse(tensors), flags=FINAL if final else 0)

    def fail(self, message: str) -> None:
        with self.lock:
            self.over = True
            error = pb.InferenceResponse(error=pb.TritonError(message))
            self.sender.send(error, flags=FINAL)

    @property
    def cancelled(self) -> bool:
        """Whether its client has gone, or its deadline passed."""
        with self.lock:
            return not self.over and bool(self.request.is_cancelled())


class ServedModel(ABC):
    """A model of the Python backend that answers from its engine's thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine."""
        self.told = parameters_of(json.loads(args["model_config"]))
        gguf = self.told.get("gguf", "")
        self.card = card_of(gguf, self.told.get("model", "served"))
        step_s = float(self.told.get("step_s", "0"))
        self.engine = engine_of(gguf, self.card, step_s=step_s)
        self.live: dict[SequenceKey, Live] = {}
        self._numbers = 0
        self._closing = threading.Event()
        self.prepare()
        self.engine.start(self._heard)
        threading.Thread(target=self._look, daemon=True).start()

    @abstractmethod
    def prepare(self) -> None:
        """Make ready what else is needed before the first request."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; they are answered later."""
        for request in requests:
            live = Live(request, request.get_response_sender())
            self._numbers += 1
            key = SequenceKey(RequestId(request.request_id() or "none"), self._numbers)
            try:
                if scalar(request, "stop"):
                    self._stop(live)
                    continue
                self.live[key] = live
                live.work = self.work_of(live, key)
                self.engine.submit(live.work)
            except (DiptychError, ValueError, KeyError) as err:
                self.live.pop(key, None)
                live.fail(self.refusal(err))

    def finalize(self) -> None:
        """Let go of the engine."""
        self._closing.set()
        self.engine.stop()

    def _stop(self, live: Live) -> None:
        name = live.request.request_id()
        for key in list(self.live):
            if key.request_id == name:
                self.engine.abort(key)
        self.stopped(live)

    def _look(self) -> None:
        while not self._closing.wait(CHECK_S):
            for key, live in list(self.live.items()):
                if live.cancelled:
                    self.engine.abort(key)

    def _heard(self, report: StepReport) -> None:
        for news in report.news:
            live = self.live.get(news.key)
            if live is None:
                continue
            match news:
                case NewTokens():
                    live.tokens += news.token_ids
                    if self.told_of(live, news.token_ids, news.finish):
                        self.live.pop(news.key, None)
                case SequenceFailed():
                    self.live.pop(news.key, None)
                    live.fail(self.refusal(ValueError(f"{news.reason}: {news.detail}")))
                case SequenceAborted():
                    self.live.pop(news.key, None)
                    self.cancelled(live)
                case _:
                    pass

    @abstractmethod
    def work_of(self, live: Live, key: SequenceKey) -> SequenceWork:
        """What the engine is asked. Raises `ValueError` for a wrong request."""

    @abstractmethod
    def told_of(self, live: Live, tokens: Sequence[int], finish: EndReason | None) -> bool:
        """Tell of new tokens; whether that was the last response."""

    @abstractmethod
    def cancelled(self, live: Live) -> None:
        """Send the final response of a cancelled request."""

    @abstractmethod
    def stopped(self, live: Live) -> None:
        """Answer a request to stop another."""

    def refusal(self, error: Exception) -> str:
        """The text of an error."""
        return str(error)


def tensor(request: Any, name: str) -> Any:
    """Input `name` without the batch's dimension; None if it was not sent."""
    found = pb.get_input_tensor_by_name(request, name)
    if found is None:
        return None
    array = found.as_numpy()
    if array.shape[0] != 1:
        raise ValueError(f"expected a batch of 1 in {name}, got shape {array.shape}")
    return array[0]


def scalar(request: Any, name: str, default: Any = None) -> Any:
    """The one value of input `name`."""
    found = tensor(request, name)
    return default if found is None else found.reshape(-1)[0]


def sampling_of(request: Any, names: Mapping[str, str]) -> Sampling:
    """The request's sampling; `names` are the inputs' for our parameters."""
    told = {ours: scalar(request, theirs) for ours, theirs in names.items()}
    known = {ours: value.item() for ours, value in told.items() if value is not None}
    if known.get("top_k") == 1:
        known["temperature"] = 0.0
    return Sampling(**known)
