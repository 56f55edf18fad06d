"""A proxy around TensorRT-LLM, real or fake, that notes every name an adapter uses of it."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

from diptych_engine.tensorrt_llm.checking import Importer
from diptych_engine.tensorrt_llm.contract import Names, shipped_contract

_MADE_BY_KEYWORD = {
    "SamplingParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "CacheTransceiverConfig",
    "SchedulerConfig",
    "Logprob",
    "DisaggregatedParams",
}


class RecordingEngine:
    """Gives what `importer` gives, and notes in `names` what is used of it."""

    def __init__(self, importer: Importer) -> None:
        self._importer = importer
        self.names = Names()

    def importer(self, name: str, /) -> Any:
        """To be given to the adapter."""
        return _Module(self._importer(name), self.names)


class _Module:
    def __init__(self, module: Any, names: Names) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name == "LLM":
            return _recorded_llm(found, self._names)
        if name in _MADE_BY_KEYWORD:
            return _recorded_class(found, name, self._names)
        if name == "CapacitySchedulerPolicy":
            return _Members(found, name, self._names)
        return found


def _recorded_class(found: type, name: str, names: Names) -> Any:
    """A subclass, so that the engine still knows its own objects."""

    class Meta(type(found)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **fields: Any) -> Any:
            assert not args, f"{name} was made with fields by place"
            names.add(name, *fields)
            return found(**fields)

        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, found)

    return Meta(found.__name__, (found,), {"__slots__": ()} if hasattr(found, "__slots__") else {})


class _Members:
    def __init__(self, found: Any, name: str, names: Names) -> None:
        self._found, self._name, self._names = found, name, names

    def __getattr__(self, member: str) -> Any:
        if member.isupper():
            self._names.add(self._name, member)
        return getattr(self._found, member)


def _recorded_llm(found: Any, names: Names) -> Any:
    class Recorded(found):  # type: ignore[misc]
        @functools.wraps(found.__init__)
        def __init__(self, model: str, **keywords: Any) -> None:
            own = set(shipped_contract().classes["LLM"].methods["__init__"].parameters)
            names.add("LLM", "__init__(model)", *(f"__init__({k})" for k in keywords if k in own))
            names.add("TorchLlmArgs", *(keyword for keyword in keywords if keyword not in own))
            super().__init__(model, **keywords)

        @functools.wraps(found.generate_async)
        def generate_async(self, inputs: Any, **keywords: Any) -> Any:
            names.add("LLM", "generate_async", "generate_async(inputs)")
            names.add("LLM", *(f"generate_async({keyword})" for keyword in keywords))
            return _Result(super().generate_async(inputs, **keywords), names)

        def __getattribute__(self, name: str) -> Any:
            if name in ("shutdown", "_check_health"):
                names.add("LLM", name)
            if name in ("get_stats_async", "get_kv_cache_events_async"):
                names.add("LLM", name, f"{name}(timeout)")
            return super().__getattribute__(name)

    return Recorded


class _Result:
    def __init__(self, result: Any, names: Names) -> None:
        self._result, self._names = result, names

    def __getattr__(self, name: str) -> Any:
        self._names.add("RequestOutput", name)
        found = getattr(self._result, name)
        return [_Output(one, self._names) for one in found] if name == "outputs" else found

    def __aiter__(self) -> AsyncIterator[Any]:
        self._names.add("RequestOutput", "__aiter__")
        return self

    async def __anext__(self) -> Any:
        self._names.add("RequestOutput", "__anext__")
        await self._result.__anext__()
        await asyncio.sleep(0)
        return self


class _Output:
    def __init__(self, output: Any, names: Names) -> None:
        self._output, self._names = output, names

    def __getattr__(self, name: str) -> Any:
        self._names.add("CompletionOutput", name)
        return getattr(self._output, name)
