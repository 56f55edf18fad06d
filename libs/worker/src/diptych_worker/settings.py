"""Settings both workers have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diptych_chassis.settings import ServiceSettings
from diptych_engine.adapters import ADAPTERS
from diptych_kvtiers.specs import MAX_BUDGET_BYTES, parse_tiers

OWN_ENGINES = ("llamacpp", "sim")
"""Those whose KV Diptych moves itself."""


@dataclass(frozen=True, slots=True)
class WorkerSettings(ServiceSettings):
    """`DIPTYCH_PREFILL_WORKER__<NAME>` or `DIPTYCH_DECODE_WORKER__<NAME>`."""

    model_path: Path = Path()
    """A GGUF file. For an engine of its own process also a folder in Hugging Face's form, of which
    tokenizer and configuration are read."""
    model: str = ""
    """The id clients ask for; empty: the file's name."""
    threads: int = 0
    """Threads of the engine; 0: half the cores, since two workers share a machine."""
    engine: str = "llamacpp"
    """`llamacpp`, `sim`, or the engine that this worker is put in front of: see `docs/engines.md`.
    `sim` computes nothing: it measures orchestration, with the card of `model_path` or, without
    one, a built-in one of bytes."""
    engine_url: str = ""
    """Where the engine behind this worker listens."""
    engine_model: str = ""
    """What the engine behind this worker calls the model."""
    engine_options: Path | None = None
    """A TOML file with settings of the engine's adapter."""
    prefix_cache: bool = True
    """Whether KV of sequences that have left is kept, in room nobody else needs, for prompts that
    begin alike."""
    kv_reuse: bool = False
    """Decode worker: whether it keeps KV that was handed over, so that of a conversation's next
    turn only blocks cross that it lacks. On a CPU 1,000 cells kept make a token 4 % slower."""
    prefix_tokens: int = 0
    """Most KV cells for it; 0: a quarter of `kv_tokens`. Full, that makes a token of a prompt that
    is not cached cost up to a quarter more on a CPU."""
    library: Path | None = None
    """The llama.cpp build; empty: the one inside xllamacpp."""
    context_tokens: int = 0
    """Longest sequence; 0: what the model was trained for, at most `kv_tokens`. The `sim` engine
    takes more too."""
    kv_tokens: int = 16_384
    """KV cells, for all sequences together."""
    max_sequences: int = 16
    """Requests that run at once."""
    embedding_tokens: int = 2048
    """Longest text to make a vector of; 0: none is made. With the first text llama.cpp takes KV
    memory for one of that length: 47 MB for SmolLM2-135M, and some 30 MB more."""
    transfer_slots: int = 160
    """KV blocks that may be on their way to this worker at once. A prompt of more is not handed
    over: one worker does both phases."""
    transfer_s: float = 10.0
    """Deadline of one hand-off, from prefill's end to verified KV."""
    lease_s: float = 75.0
    """A ticket that was neither used nor released is taken back after this: longer than the
    deadline of the first token, so that a prefill that waits its turn keeps its ticket."""
    links: tuple[str, ...] = ("shm", "nixl", "tcp")
    """KV links to offer and to write over, fastest first; `nixl` counts only where it is
    installed (`diptych doctor links`)."""
    kv_nixl: Literal["loopback", "isolated"] = "loopback"
    """How far the nixl link reaches. NIXL encrypts nothing: `isolated` says that nobody else
    reaches the devices in UCX_NET_DEVICES, and needs UCX_TLS named as well."""
    kv_host: str = "127.0.0.1"
    """Address the tcp link listens on; a wildcard announces this machine's own address."""
    kv_port: int = 0
    """0 takes a free one."""
    kv_tls: Literal["required", "off"] = "required"
    """Whether KV crosses tcp through mutual TLS 1.3 and not otherwise; `off` is for networks that
    nobody else reaches, and goes with a `kv_host` that is no wildcard."""
    kv_codec: str = "raw"
    """How KV leaves this worker: `raw`, `zstd` (lossless), `int8`, `fp8`, `delta` (these three give
    back nearly what was computed), or `auto`: what loses least of `kv_codecs` and is in time. The
    other worker must list it, else its KV goes as it is."""
    kv_codecs: tuple[str, ...] = ("raw", "zstd")
    """How KV may come here, and leave here under `auto`."""
    kv_codec_budget_s: float = 0.05
    """`auto`: what of the first token's time a hand-off may take before KV is encoded for it."""
    kv_seal: Literal["off", "required"] = "off"
    """Whether blocks are sealed (AES-256-GCM, a key for each transfer) over links without TLS:
    shared memory, RDMA. Required by one, it is done; a worker that cannot is refused."""
    kv_parking_host_bytes: int = 0
    """Decode worker: memory in which KV may wait until the engine has a seat (`dis-cpu`). It is
    taken as it is needed."""
    kv_parking_disk_bytes: int = 0
    """Decode worker: the same on disk (`dis-disk`), sealed with a key of this process's own."""
    kv_parking_dir: Path = Path()
    """Where that file lies: a folder of this user's alone (0700). It has no name, so none is left
    behind."""
    kv_tiers: tuple[str, ...] = ()
    """Where KV is kept beyond the engine, the fastest first, each with what it may hold:
    `host:2GiB,disk:20GiB:/var/lib/diptych/kv`; see `docs/kv.md`."""
    kv_tier_key: Path | None = None
    """A file with the fleet's key: entries in tiers are sealed with it."""
    kv_tier_sightings: int = 2
    """At which sighting a block of a prompt is written to the tiers; 1: at once."""
    kv_restore: Literal["cost", "always"] = "cost"
    """Whether KV in a tier is read only where that is believed to be faster than computing it, or
    wherever it is found."""
    drain_s: float = 60.0
    device_watts: float = 300.0
    """Board power of the simulated device."""

    def __post_init__(self) -> None:
        parse_tiers(self.kv_tiers)
        if self.kv_tier_sightings < 1:
            raise ValueError(f"kv_tier_sightings: expected 1 or more, got {self.kv_tier_sightings}")
        known = (*OWN_ENGINES, *sorted(ADAPTERS))
        if self.engine not in known:
            raise ValueError(f"engine: expected one of {', '.join(known)}, got {self.engine!r}")
        for name in ("kv_parking_host_bytes", "kv_parking_disk_bytes"):
            n_bytes = getattr(self, name)
            if not 0 <= n_bytes <= MAX_BUDGET_BYTES:
                raise ValueError(f"{name}: expected 0 to {MAX_BUDGET_BYTES}, got {n_bytes}")
        if self.kv_parking_disk_bytes and self.kv_parking_dir == Path():
            raise ValueError("kv_parking_dir: expected a folder to park KV in, got none")
