"""What can be set about the adapter, in the TOML file of a worker's `ENGINE_OPTIONS`."""

from typing import Literal

import msgspec

from diptych_contracts.errors import Permanent
from diptych_engine.over_http.limits import Millis, Pause, Seconds

ADDRESS = "127.0.0.1:8001"
"""Triton's own default for gRPC, on this machine."""


def grpc_target(url: str) -> str:
    """Where to dial for `engine_url`; empty: Triton's default.

    Raises:
        Permanent: it is an address of Triton's HTTP side, or none.
    """
    target = url.removeprefix("grpc://").rstrip("/")
    if not target:
        return ADDRESS
    if "://" in target or "/" in target or "@" in target or not target.isprintable():
        raise Permanent(
            "engine_url: expected host:port or grpc://host:port of Triton's gRPC side (8001 by "
            "default), got a URL of another kind"
        )
    return target


class TritonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All have a default that suits one server on this machine."""

    metrics_url: str = ""
    """Triton's metrics page (`http://…:8002/metrics`), which says how full the engine is."""
    ready_s: Pause = 120.0
    """How long the server may take to load the model."""
    call_s: Seconds = 5.0
    """Deadline of everything but answers."""
    probe_s: Seconds = 4.0
    """Deadline of the token that a health probe asks for."""
    answer_s: Seconds = 600.0
    """Deadline of a whole answer: gRPC's, which reaches the model."""
    let_go_s: Seconds = 5.0
    """How long an abort waits to hear that the engine has let go."""
    manage_model: bool = False
    """Load the model at the start and unload it at the end: for a server in explicit mode whose
    model nobody else uses."""
    tenants_share_kv: bool = False
    """Accept an engine that reuses KV for whoever sends such a prompt: Triton takes no salt."""
    first_token: Literal["prefill", "decode"] = "prefill"
    """Whose first token counts. The generation model gives it again either way."""
    orphan_ms: Millis = 0
    """After so long the engine frees KV that nobody fetched, as it was set up."""
    dtype: str = "engine"
    """What weights and KV are in; must be equal where KV is handed over."""
    tls_roots: str = ""
    """A file of certificates to trust; with it the connection is TLS."""
