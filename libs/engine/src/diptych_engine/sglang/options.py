"""Settings of the SGLang adapter: the worker's `engine_options`."""

import msgspec


class SglangOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, as it was started."""

    api_key: str = ""
    """`--api-key`."""
    bootstrap_host: str = ""
    """Prefill: where decode's server reaches its bootstrap server; empty: the host of the URL."""
    bootstrap_port: int = 0
    """Prefill: `--disaggregation-bootstrap-port`; 0: what the server says, else 8998."""
    start_s: float = 900.0
    """How long the server may take to be ready: a large model takes minutes."""
    silence_s: float = 120.0
    """Longest time without a token before the server is given up."""
    meeting_s: float = 30.0
    """Prefill: how much longer it may take, since it waits for decode to come to its room."""
    probe_s: float = 30.0
    """How often an idle server must make a token to be healthy."""
