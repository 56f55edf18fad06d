"""`tensorrt_llm` of the LLM API: text in, the whole text so far out."""

from collections.abc import Sequence

import numpy as np
import triton_python_backend_utils as pb

from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Stopping
from diptych_engine.port import Phase, SequenceKey, SequenceWork
from diptych_testkit.triton_models.answering import Live, ServedModel, sampling_of, scalar
from diptych_text.codec import TextCodec

CANCELLED = "Request cancelled by client"
SAMPLING = {
    ours: f"sampling_param_{ours}"
    for ours in (
        *("temperature", "top_k", "top_p", "seed"),
        *("presence_penalty", "frequency_penalty"),
    )
}


class TritonPythonModel(ServedModel):
    """See the module."""

    def prepare(self) -> None:
        self._codec = TextCodec.from_card(self.card)

    def work_of(self, live: Live, key: SequenceKey) -> SequenceWork:
        request = live.request
        text = scalar(request, "text_input").decode()
        if not scalar(request, "streaming", False):
            raise ValueError("expected streaming")
        return SequenceWork(
            key=key,
            phase=Phase.GENERATE,
            prompt_ids=self._codec.encode(text),
            answer_ids=(),
            sampling=sampling_of(request, SAMPLING),
            stopping=Stopping(max_tokens=int(scalar(request, "sampling_param_max_tokens", 16))),
        )

    def told_of(self, live: Live, tokens: Sequence[int], finish: EndReason | None) -> bool:
        told = b"".join(self._codec.token_bytes(token) for token in live.tokens)
        text = told.decode("utf-8", "replace")
        reason = str(finish) if finish is not None else "None"
        tensors = [
            pb.Tensor("text_output", np.array([[text.encode()]], np.object_)),
            pb.Tensor("finish_reason", np.array([[reason.encode()]], np.object_)),
        ]
        live.send(tensors, final=finish is not None)
        return finish is not None

    def cancelled(self, live: Live) -> None:
        live.fail(CANCELLED)

    def stopped(self, live: Live) -> None:
        live.fail(CANCELLED if live.request.request_id() else "stop needs a request id")
