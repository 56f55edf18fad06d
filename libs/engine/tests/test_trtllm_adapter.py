"""What a worker's settings make of TensorRT-LLM."""

from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_engine.adapters import AdapterSettings, make_engine
from diptych_engine.sim_card import sim_card
from diptych_engine.tensorrt_llm.engine import TrtLlmEngine
from diptych_engine.tensorrt_llm.serve import TrtLlmServe


def settings(name: str, **changes: Any) -> AdapterSettings:
    told: dict[str, Any] = {
        "card": sim_card(model="toy"),
        "role": Role.DECODE,
        "kv_tokens": 4096,
        "max_sequences": 8,
    }
    return AdapterSettings(name=name, **(told | changes))


def test_it_is_made_by_name() -> None:
    inside = make_engine(settings("tensorrt_llm", model_path=Path("/models/x")))
    assert isinstance(inside, TrtLlmEngine)
    assert inside.spec.hand_off is not None
    assert inside.spec.layout.slot_bytes == 0
    behind = make_engine(settings("trtllm_serve", url="http://127.0.0.1:8000"))
    assert isinstance(behind, TrtLlmServe)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("tensorrt_llm", {}, "no weights: set MODEL_PATH or the option 'checkpoint'"),
        ("trtllm_serve", {}, "no server: set ENGINE_URL"),
        ("tensorrt_llm", {"options": {"tensor_paralel": 2}}, "tensor_paralel"),
        ("tensorrt_llm", {"options": {"transceiver": "MPI"}}, "transceiver"),
        ("trtllm_serve", {"options": {"events": 1}}, "events"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Permanent, match=says):
        make_engine(settings(name, **changes))


def test_phases_in_two_precisions_pair_by_the_models_name() -> None:
    fp8, fp4 = (
        make_engine(
            settings("tensorrt_llm", engine_model="llama", model_path=Path(f"/models/{weights}"))
        ).spec
        for weights in ("llama-fp8", "llama-fp4")
    )
    assert fp8.fingerprint == fp4.fingerprint
    assert fp8.hand_off == fp4.hand_off
