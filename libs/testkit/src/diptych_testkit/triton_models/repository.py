"""Writes model repositories."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from diptych_testkit.triton_models import tables

BATCHED = "max_batch_size: 64\nmodel_transaction_policy { decoupled: true }"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to serve."""

    name: str = "tensorrt_llm"
    llm_api: bool = False
    gguf: str = ""
    """Weights; empty: the simulated engine."""
    step_s: float = 0.0
    parameters: dict[str, str] = field(default_factory=dict)
    """More of its configuration, or other values."""


def write(folder: Path, model: Model, *, transceiver: Path) -> None:
    """Write `model` into the repository `folder`."""
    kind = "llm_api" if model.llm_api else "inflight"
    parameters = {
        "gguf": model.gguf,
        "step_s": str(model.step_s),
        "transceiver": str(transceiver),
        "enable_kv_cache_reuse": "false",
        **model.parameters,
    }
    if model.llm_api:
        text = tables.config(
            model.name,
            inputs=tables.LLM_API_INPUTS,
            outputs=tables.LLM_API_OUTPUTS,
            parameters=parameters,
            more=BATCHED,  # the real one completes its configuration by its `model.yaml`
        )
    else:
        text = tables.config(
            model.name,
            inputs=tables.INFLIGHT_INPUTS,
            outputs=tables.INFLIGHT_OUTPUTS,
            parameters=parameters,
            more=BATCHED,
        )
    version = folder / model.name / "1"
    version.mkdir(parents=True)
    (folder / model.name / "config.pbtxt").write_text(text)
    # It heeds no PYTHONPATH: it is told here what this process imports from, after its own numpy.
    paths = [path for path in sys.path if path]
    source = f"import sys\nsys.path += {paths!r}\n"
    source += f"from diptych_testkit.triton_models.{kind} import TritonPythonModel\n"
    (version / "model.py").write_text(source)
