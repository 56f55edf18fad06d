"""The installed TensorRT-LLM, for `diptych doctor engine`: version, contract, features."""

from collections.abc import AsyncIterator
from importlib import import_module

from diptych_contracts.errors import Permanent
from diptych_engine.examining import EngineFinding, Examined
from diptych_engine.tensorrt_llm.checking import Importer, check
from diptych_engine.tensorrt_llm.contract import shipped_contract
from diptych_engine.tensorrt_llm.package import ADVICE, installed_version, load_package


async def examine(_: Examined, importer: Importer = import_module) -> AsyncIterator[EngineFinding]:
    """Every difference from the contract, then what this build can do."""
    contract = shipped_contract()
    try:
        version = installed_version(importer)
    except Permanent as err:
        found = str(err).removesuffix(f". {ADVICE}")
        yield EngineFinding("package", found, "missing", ADVICE)
        return
    yield EngineFinding("package", f"TensorRT-LLM {version}")
    problems = check(contract, version, importer)
    for problem in problems:
        yield EngineFinding("contract", str(problem), "missing" if problem.fatal else "note")
    if any(problem.fatal for problem in problems):
        return
    yield EngineFinding("contract", f"holds ({contract.versions})")
    for line in load_package(importer)[1].report():
        yield EngineFinding("feature", line)
