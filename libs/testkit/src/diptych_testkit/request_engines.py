"""Adapters of engines that are not here, on fakes that keep to their contracts."""

from collections.abc import Sequence
from typing import Any

from diptych_contracts.cards import Fingerprint
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import Phase, SequenceKey, SequenceWork
from diptych_engine.tensorrt_llm.checking import Importer
from diptych_engine.tensorrt_llm.engine import TrtLlmEngine
from diptych_engine.tensorrt_llm.options import LlmOptions
from diptych_engine.tensorrt_llm.served import Served
from diptych_testkit.toy_engine import EOS_ID, GREEDY


def served(role: Role = Role.PREFILL, **changes: Any) -> Served:
    """The toy model, as TensorRT-LLM would serve it."""
    told: dict[str, Any] = {
        "checkpoint": "toy",
        "fingerprint": Fingerprint(base="toy", weights="trtllm:toy:auto"),
        "role": role,
        "context_tokens": 4096,
        "vocab_size": 1000,
        "eos_ids": (EOS_ID,),
        "max_sequences": 64,
    }
    return Served(**(told | changes))


def trtllm(importer: Importer, role: Role = Role.PREFILL, **options: Any) -> TrtLlmEngine:
    """The adapter, not started."""
    return TrtLlmEngine(served(role), LlmOptions(**options), importer=importer)


def work(  # noqa: PLR0913 - a test names the one it means
    prompt_ids: Sequence[int],
    *,
    phase: Phase = Phase.GENERATE,
    max_tokens: int = 8,
    answer_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    tenant: str = "",
    hand_off: EngineHandOff | None = None,
    ignore_eos: bool = False,
    name: str = "r",
) -> SequenceWork:
    """A work of the toy model."""
    return SequenceWork(
        key=SequenceKey(RequestId(name), 1),
        phase=phase,
        prompt_ids=prompt_ids,
        answer_ids=answer_ids,
        sampling=sampling,
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos),
        tenant=tenant,
        hand_off=hand_off,
    )
