"""Settings of the SGLang adapter: the worker's `engine_options`."""

import msgspec

from diptych_engine.over_http.limits import Pause, Port, Seconds


class SglangOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, as it was started."""

    api_key: str = ""
    """`--api-key`."""
    bootstrap_host: str = ""
    """Where decode's server reaches prefill's bootstrap server; empty: the host of its URL."""
    bootstrap_port: Port = 0
    """`--disaggregation-bootstrap-port` of prefill; 0: what its server says, else 8998."""
    prefill_url: str = ""
    """Decode: a prefill server that its adapter may ask itself. A decode server computes no
    prompts, so without one it answers no request in one piece, none whose prefill worker is gone.
    """
    start_s: Pause = 900.0
    """How long the server may take to be ready: a large model takes minutes."""
    silence_s: Seconds = 120.0
    """Longest time without a token before the server is given up."""
    meeting_s: Pause = 30.0
    """Prefill: how much longer it may take, since it waits for decode to come to its room."""
    probe_s: Pause = 30.0
    """How often an idle server must make a token to be healthy."""
