"""The package as it would be installed."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from diptych_testkit.fake_tensorrt_llm import shapes
from diptych_testkit.fake_tensorrt_llm.llm import Llm, Llm12, Llm13
from diptych_testkit.fake_tensorrt_llm.results import RequestOutput, RequestOutput13
from diptych_testkit.fake_tensorrt_llm.world import Faults, World


@dataclass(slots=True)
class Installed:
    """One machine's engine.

    `names` may be changed: a test that renames one sees what the checker says.
    """

    version: str
    world: World
    faults: Faults
    names: dict[str, Any]
    llms: list[Llm] = field(default_factory=list)
    """Those that were made."""

    def importer(self, name: str, /) -> Any:
        """What `importlib.import_module` would give."""
        match name:
            case "tensorrt_llm":
                return SimpleNamespace(__version__=self.version)
            case "tensorrt_llm.llmapi" | "tensorrt_llm.executor" | "tensorrt_llm.executor.result":
                return SimpleNamespace(**self.names)
        raise ModuleNotFoundError(f"No module named {name!r}")


def at(
    version: str,
    *,
    world: World | None = None,
    faults: Faults | None = None,
    eos_at: int | None = None,
) -> Installed:
    """An engine of `version` (1.2 or 1.3) that shares `world` with others."""
    world, faults, made = world or World(), faults or Faults(), list[Llm]()
    old = version.startswith("1.2")
    own = {"world": world, "faults": faults, "eos_at": eos_at, "made": made}
    names = {
        "LLM": type("LLM", (Llm12 if old else Llm13,), own),
        "TorchLlmArgs": shapes.TorchLlmArgs,
        "SamplingParams": shapes.SamplingParams,
        "GuidedDecodingParams": shapes.GuidedDecodingParams,
        "DisaggregatedParams": (
            shapes.DisaggregatedParams12 if old else shapes.DisaggregatedParams13
        ),
        "KvCacheConfig": shapes.KvCacheConfig,
        "CacheTransceiverConfig": (
            shapes.CacheTransceiverConfig12 if old else shapes.CacheTransceiverConfig13
        ),
        "SchedulerConfig": shapes.SchedulerConfig,
        "CapacitySchedulerPolicy": shapes.CapacitySchedulerPolicy,
        "RequestOutput": RequestOutput if old else RequestOutput13,
        "CompletionOutput": shapes.CompletionOutput,
        "Logprob": shapes.Logprob,
        "RequestError": shapes.RequestError,
    }
    return Installed(version, world, faults, names, made)
