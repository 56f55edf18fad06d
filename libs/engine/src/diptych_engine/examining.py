"""What `diptych doctor engine` finds out of an engine: whether it is there, which one, what it can.

An adapter with more to tell than a version adds a line to `EXAMINERS`: an async function that takes
`Examined` and yields findings. The others are asked over HTTP where their health and version stand.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import msgspec

from diptych_contracts.errors import Permanent
from diptych_engine.adapters import ADAPTERS
from diptych_engine.over_http.addresses import http_url
from diptych_engine.over_http.contract import Contract, version_key
from diptych_engine.over_http.reading import from_json

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """One thing found."""

    about: str
    found: str
    grade: Literal["fine", "note", "missing"] = "fine"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """Which engine is looked at."""

    name: str
    url: str = ""


Examiner = Callable[[Examined], AsyncIterator[EngineFinding]]

EXAMINERS: Mapping[str, str] = {
    "tensorrt_llm": "diptych_engine.tensorrt_llm.examining:examine",
}
"""`module:function` by engine name."""

HTTP_PATHS: Mapping[str, tuple[str, str]] = {
    "trtllm_serve": ("/health", "/version"),
    "vllm": ("/health", "/version"),
    "sglang": ("/health", "/get_server_info"),
    "triton": ("/v2/health/ready", "/v2"),
}
"""Where health and version stand, by engine name."""

CONTRACTS: Mapping[str, str] = {
    "vllm": "diptych_engine.vllm.contract:CONTRACT",
    "sglang": "diptych_engine.sglang.contract:CONTRACT",
}
"""Of the engines whose contract names the versions it was read in: `module:name`."""


def known() -> list[str]:
    """The engines that can be looked at."""
    return sorted({*EXAMINERS, *HTTP_PATHS, *ADAPTERS})


async def examine(examined: Examined) -> AsyncIterator[EngineFinding]:
    """What is found, one after the other."""
    if (where := EXAMINERS.get(examined.name)) is not None:
        module, _, function = where.partition(":")
        examiner: Examiner = getattr(import_module(module), function)
        async for finding in examiner(examined):
            yield finding
        return
    if examined.name not in HTTP_PATHS:
        yield EngineFinding(examined.name, "nothing is known of how to ask it", "note")
        return
    async for finding in _over_http(examined, *HTTP_PATHS[examined.name]):
        yield finding


async def _over_http(examined: Examined, health: str, version: str) -> AsyncIterator[EngineFinding]:
    if not examined.url:
        yield EngineFinding(
            examined.name, "no address given", "missing", "say where it listens: --url URL"
        )
        return
    try:
        import httpx
    except ImportError:
        yield EngineFinding(
            "httpx", "not installed", "missing", f"pip install 'diptych[{examined.name}]'"
        )
        return
    try:
        url = http_url(examined.url, "--url")
    except Permanent as err:
        yield EngineFinding(examined.name, str(err), "missing", "say where it listens: --url URL")
        return
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            answer = await client.get(health)
        except httpx.HTTPError as err:
            found = f"{type(err).__name__}: {err}"
            yield EngineFinding("reachable", found, "missing", f"start it, or mend {examined.url}")
            return
        healthy = answer.status_code == 200
        yield EngineFinding(
            "healthy", f"{health} answers {answer.status_code}", "fine" if healthy else "missing"
        )
        try:
            told: Any = from_json((await client.get(version)).content)
        except (httpx.HTTPError, msgspec.DecodeError) as err:
            yield EngineFinding("version", f"{version} tells none: {err}", "note")
            return
        found = str(told.get("version", "")) if isinstance(told, dict) else ""
        yield EngineFinding(
            "version", found or f"{version} tells none", "fine" if found else "note"
        )
        if found and examined.name == "trtllm_serve":
            yield _within_contract(found)
        elif found and (where := CONTRACTS.get(examined.name)) is not None:
            module, _, name = where.partition(":")
            yield _since_contract(getattr(import_module(module), name), found)


def _since_contract(contract: Contract, version: str) -> EngineFinding:
    """Whether `version` has what the adapter asks for: what its start looks at too."""
    least, newest = contract.versions
    grade: Literal["fine", "note", "missing"] = "fine"
    if version_key(version) < version_key(least):
        grade = "missing"
    elif version_key(version)[:2] > version_key(newest)[:2]:
        grade = "note"
    return EngineFinding("contract", f"{version}, read in {least} to {newest}", grade)


def _within_contract(version: str) -> EngineFinding:
    from diptych_engine.tensorrt_llm.contract import shipped_contract
    from diptych_engine.tensorrt_llm.versions import Version, in_range

    wanted = shipped_contract().versions
    try:
        fits = in_range(Version.of(version), wanted)
    except ValueError:
        fits = False
    return EngineFinding(
        "contract", f"{version}, written for {wanted}", "fine" if fits else "missing"
    )
