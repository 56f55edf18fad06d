"""`tensorrt_llm` of the C++ backend: token ids, context and generation apart."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Stopping
from diptych_engine.port import KvBlock, Phase, SequenceKey, SequenceWork
from diptych_testkit.triton_models.answering import Live, ServedModel, sampling_of, scalar, tensor
from diptych_testkit.triton_models.transceiver import ContextParams, Sink, Transceiver

PHASES = {
    "context_only": Phase.PREFILL,
    "generation_only": Phase.DECODE,
    "context_and_generation": Phase.GENERATE,
}
SAMPLING = {
    "temperature": "temperature",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
}


class TritonPythonModel(ServedModel):
    """See the module."""

    def prepare(self) -> None:
        folder = Path(self.told["transceiver"])
        layout = self.engine.spec.layout
        self._slot_bytes = layout.slot_bytes
        self._transceiver = Transceiver(folder, block_tokens=layout.block_tokens)

    def work_of(self, live: Live, key: SequenceKey) -> SequenceWork:
        request = live.request
        ids = tensor(request, "input_ids")
        if ids is None or len(ids) != scalar(request, "input_lengths"):
            raise ValueError("expected input_ids of input_lengths")
        if not scalar(request, "streaming", False):
            raise ValueError("expected streaming")
        said = json.loads(request.parameters() or "{}").get("request_type")
        phase = PHASES.get(said, Phase.GENERATE)  # the real one logs and goes on, too
        print(said, request.request_id(), flush=True)  # noqa: T201 - into the server's log
        prompt = tuple(int(token) for token in ids)
        first: tuple[int, ...] = ()
        blocks: Sequence[KvBlock] = ()
        if phase is Phase.DECODE:
            params = self._params(request, prompt)
            blocks, first = self._transceiver.fetch(params), (params.first_token,)
        stopping = Stopping(
            max_tokens=int(scalar(request, "request_output_len")),
            ignore_eos=scalar(request, "end_id") is None,
        )
        if first:
            self._send(live, first, final=False)
        return SequenceWork(
            key=key,
            phase=phase,
            prompt_ids=prompt,
            answer_ids=first,
            sampling=sampling_of(request, SAMPLING),
            stopping=stopping,
            sink=Sink(self._slot_bytes) if phase is Phase.PREFILL else None,
            blocks=blocks,
        )

    @staticmethod
    def _params(request: Any, prompt: tuple[int, ...]) -> ContextParams:
        found = tensor(request, "context_phase_params")
        if found is None:
            raise ValueError("context_phase_params must be present for a generation_only request")
        params = ContextParams.decode(found.tobytes())
        if params.input_ids != prompt:
            raise ValueError("input_ids must be those of the context request")
        return params

    def told_of(self, live: Live, tokens: Sequence[int], finish: EndReason | None) -> bool:
        work = live.work
        context = work is not None and work.phase is Phase.PREFILL
        params = self._keep(work, tokens) if context and work is not None else b""
        final = finish is not None or context
        self._send(live, tokens, final=final, params=params)
        return final

    def _keep(self, work: SequenceWork, tokens: Sequence[int]) -> bytes:
        assert isinstance(work.sink, Sink)
        first = tokens[0] if tokens else self.card.eos_ids[0]
        name = self._transceiver.keep(work.sink.blocks)
        return ContextParams(name, first, tuple(work.prompt_ids)).encode()

    @staticmethod
    def _send(live: Live, tokens: Sequence[int], *, final: bool, params: bytes = b"") -> None:
        tensors = [
            pb.Tensor("output_ids", np.array([[list(tokens)]], np.int32)),
            pb.Tensor("sequence_length", np.array([[len(tokens)]], np.int32)),
        ]
        if params:
            blob = np.frombuffer(params, np.uint8)[np.newaxis]
            tensors.append(pb.Tensor("context_phase_params", blob))
        live.send(tensors, final=final)

    def cancelled(self, live: Live) -> None:
        self._send(live, (), final=True)

    def stopped(self, live: Live) -> None:
        self._send(live, (), final=True)

    def refusal(self, error: Exception) -> str:
        return f"Executor failed process requestId 1 due to the following error: {error}"
