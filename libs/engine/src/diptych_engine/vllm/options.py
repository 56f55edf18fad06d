"""Settings of the vLLM adapter: the worker's `engine_options`."""

from typing import Literal

import msgspec

from diptych_engine.over_http.limits import Pause, Seconds


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, as it was started."""

    api_key: str = ""
    """`--api-key`."""
    hand_off: bool = True
    """Whether it was started with the NIXL connector."""
    lease_s: Seconds = 30.0
    """`kv_lease_duration`: how long prefill keeps KV that nobody fetches."""
    token_level: Literal["auto", "off"] = "auto"
    """Whether to use `/inference/v1/generate`, if it is there (`--enable-scale-out`)."""
    lark: bool = False
    """Whether it obeys llguidance's Lark: `--structured-outputs-config.backend guidance`."""
    kv_events: str = ""
    """Where it publishes KV events, `tcp://host:5557`; empty: nowhere."""
    kv_replay: str = ""
    """Its `replay_endpoint`; empty: none. Then what is missed empties the index."""
    kv_topic: str = ""
    """The topic it publishes under."""
    start_s: Pause = 900.0
    """How long the server may take to answer for the first time: a large model takes minutes."""
    silence_s: Seconds = 120.0
    """Longest time without a token before the server is given up."""
    probe_s: Pause = 30.0
    """How often an idle server must make a token to be healthy."""
