"""The installed engine, imported when a worker asks for it and held against the contract first."""

import importlib.metadata
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from diptych_contracts.errors import Permanent
from diptych_engine.tensorrt_llm.checking import Importer, Problem, check, fields_of
from diptych_engine.tensorrt_llm.contract import Contract, shipped_contract
from diptych_engine.tensorrt_llm.versions import Version

ADVICE = (
    "TensorRT-LLM comes from NVIDIA's own index and wants numpy < 2: run this worker in its own "
    "image or venv (docs/engines/tensorrt-llm.md)"
)


@dataclass(frozen=True, slots=True)
class Package:
    """The engine's names that the adapter uses, as they are written there."""

    version: str
    LLM: Any
    TorchLlmArgs: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    DisaggregatedParams: Any
    KvCacheConfig: Any
    CacheTransceiverConfig: Any
    SchedulerConfig: Any
    CapacitySchedulerPolicy: Any
    Logprob: Any
    RequestError: Any


@dataclass(frozen=True, slots=True)
class Features:
    """What differs between versions, found by looking and not by the version's number."""

    version: str
    disagg_request_id: bool
    """Both legs can be given one id."""
    first_log_probs: bool
    """The hand-off can carry the logprobs of its first token."""
    health_check: bool
    process_ids: bool
    """Ids of hand-offs have 8 bits of node and 6 of process, rather than 10 of machine."""
    hand_off_fields: tuple[str, ...]

    def report(self) -> list[str]:
        """What was found, a line each."""
        layout = "node 8, process 6, counter 10" if self.process_ids else "machine 10, counter 12"
        return [
            f"version {self.version}",
            f"one request id on both legs: {_yes(self.disagg_request_id)}, bits: {layout}",
            f"logprobs of the first token in the hand-off: {_yes(self.first_log_probs)}",
            f"health check of its own: {_yes(self.health_check)}",
            f"fields of a hand-off: {', '.join(self.hand_off_fields)}",
        ]


def installed_version(importer: Importer = import_module) -> str:
    """The version of the installed engine.

    Raises:
        Permanent: there is none, or it cannot be imported here; the message says what to do.
    """
    try:
        module = importer("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as err:  # its libraries want CUDA at import
        raise Permanent(f"TensorRT-LLM cannot be imported: {err}. {ADVICE}") from err
    told = getattr(module, "__version__", None)
    return str(told or importlib.metadata.version("tensorrt_llm"))


def load_package(
    importer: Importer = import_module, contract: Contract | None = None
) -> tuple[Package, Features, list[Problem]]:
    """The engine, what it can do, and where it differs harmlessly from the contract.

    Raises:
        Permanent: it is not there, or it differs from the contract; all differences are named.
    """
    contract = contract or shipped_contract()
    version = installed_version(importer)
    problems = check(contract, version, importer)
    if fatal := [problem for problem in problems if problem.fatal]:
        raise Permanent(refusal(contract, version, fatal))
    names = {}
    for name in (name for name in contract.classes if name in Package.__slots__):
        module, _, attribute = contract.classes[name].path.partition(":")
        names[name] = getattr(importer(module), attribute)
    package = Package(version=version, **names)
    return package, features_of(package), problems


def refusal(contract: Contract, version: str, fatal: Iterable[Problem]) -> str:
    """Why this engine is not used, in one readable message."""
    lines = "; ".join(map(str, fatal))
    return (
        f"TensorRT-LLM {version} is not what this adapter is written for "
        f"({contract.versions}): {lines}"
    )


def features_of(package: Package) -> Features:
    """What the engine has, of what only some versions have."""
    fields = tuple(sorted(fields_of(package.DisaggregatedParams)))
    return Features(
        version=package.version,
        disagg_request_id="disagg_request_id" in fields,
        first_log_probs="first_gen_log_probs" in fields,
        health_check=callable(inspect.getattr_static(package.LLM, "_check_health", None)),
        process_ids=not Version.of(package.version) < Version.of("1.3.0rc22"),
        hand_off_fields=fields,
    )


def _yes(found: bool) -> str:
    return "yes" if found else "no"
