"""Which engines outside Diptych a worker can be put in front of, by the name its settings give.

An adapter is a module of its own that is imported only where it is asked for, since what it needs
(a client, a GPU) is installed nowhere else. It adds one line to `ADAPTERS`; its function takes an
`AdapterSettings` and gives a `RequestEngine` at once. Reaching the engine, and learning what is not
known before (its version, say), is the affair of `RequestEngine.start`: after it `spec` is whole.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diptych_contracts.cards import Fingerprint, KvLayout, ModelCard
from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_engine.port import EngineSpec
from diptych_engine.request_port import RequestEngine

ADAPTERS: Mapping[str, str] = {
    "sglang": "diptych_engine.sglang.engine:make",
    "tensorrt_llm": "diptych_engine.tensorrt_llm.adapter:llm_api",
    "triton": "diptych_engine.triton.engine:make",
    "trtllm_serve": "diptych_engine.tensorrt_llm.adapter:behind_http",
    "vllm": "diptych_engine.vllm.engine:make",
}
"""`module:function` by engine name."""

MAX_OPTIONS_BYTES = 64 * 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """What a worker tells an adapter."""

    name: str
    """The engine's, as in `ADAPTERS`."""
    card: ModelCard
    role: Role
    url: str = ""
    """Where the engine listens; empty for one inside the process."""
    engine_model: str = ""
    """What the engine calls the model; empty: the adapter finds it out, or needs none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own settings, not judged yet: see `options_as`."""
    model_path: Path = Path()
    kv_tokens: int
    """Of all sequences together, unless the engine itself says how many it holds."""
    max_sequences: int

    def options_as(self, kind: type[T]) -> T:
        """The options as `kind`, a `msgspec.Struct` that forbids unknown fields.

        Raises:
            Permanent: names the option, and says what was expected.
        """
        try:
            return msgspec.convert(dict(self.options), kind)
        except msgspec.ValidationError as err:
            raise Permanent(f"options of engine {self.name!r}: {err}") from err

    def fingerprint(self, *, dtype: str) -> Fingerprint:
        """Which weights: the card's model, as this engine runs them in `dtype`.

        KV of two engines never mixes, whatever else they have in common.
        """
        model = self.engine_model or self.card.model
        weights = f"{self.name}:{model}:{dtype}"
        return Fingerprint(base=self.card.fingerprint.base, weights=weights)

    def layout(self, *, block_tokens: int, dtype: str) -> KvLayout:
        """How the engine keeps KV: in blocks that never pass through slots of ours."""
        return KvLayout(
            layout_id="engine",
            engine_build=self.name,
            block_tokens=block_tokens,
            slot_bytes=0,
            dtype=dtype,
        )

    def spec(self, *, block_tokens: int, dtype: str) -> EngineSpec:
        """What an adapter that has not started yet says of its engine."""
        return EngineSpec(
            engine=self.name,
            fingerprint=self.fingerprint(dtype=dtype),
            layout=self.layout(block_tokens=block_tokens, dtype=dtype),
            context_tokens=self.card.context_tokens,
            kv_tokens=self.kv_tokens,
            max_sequences=self.max_sequences,
            vocab_size=self.card.vocab_size,
            eos_ids=self.card.eos_ids,
        )


Factory = Callable[[AdapterSettings], RequestEngine]


def make_engine(settings: AdapterSettings) -> RequestEngine:
    """The engine of that name, not started.

    Raises:
        Permanent: there is none, what it needs is not installed, or its settings are wrong.
    """
    where = ADAPTERS.get(settings.name)
    if where is None:
        known = ", ".join(sorted(ADAPTERS))
        raise Permanent(f"unknown engine {settings.name!r}: expected one of {known}")
    module, _, function = where.partition(":")
    try:
        factory: Factory = getattr(import_module(module), function)
    except ImportError as err:
        raise Permanent(
            f"engine {settings.name!r} needs what is not installed here: {err}"
        ) from err
    return factory(settings)


def read_options(path: Path | None) -> dict[str, Any]:
    """The options in a TOML file; none without one. Raises `Permanent` with one clear line."""
    if path is None:
        return {}
    try:
        data = path.read_bytes()
        if len(data) > MAX_OPTIONS_BYTES:
            raise Permanent(f"{path}: expected at most {MAX_OPTIONS_BYTES} bytes of options")
        return tomllib.loads(data.decode())
    except OSError as err:
        raise Permanent(f"cannot read the engine's options {path}: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise Permanent(f"{path} is no TOML: {err}") from err
