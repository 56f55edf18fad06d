"""What an operator may set: `DIPTYCH_GATEWAY__<NAME>`."""

from dataclasses import dataclass

from diptych_chassis.settings import ServiceSettings
from diptych_policy.attendance import RESUME_GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    host: str = "127.0.0.1"
    port: int = 8080
    reuse_port: bool = False
    """Let several gateways of one user on one machine share the port (SO_REUSEPORT): the kernel
    spreads connections over them. One that drains leaves the port first."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Of a body, and of a message on a WebSocket."""
    body_s: float = 30.0
    """How long a client may take to send its body."""
    max_bodies: int = 1024
    """Bodies being read at once; beyond it the one that has taken longest gives way."""
    max_in_flight: int = 256
    default_max_tokens: int = 1024
    """Longest answer to a request without `max_tokens`: workers promise KV room for the whole
    answer, so the rest of the context would let two such requests fill a worker."""
    accept_s: float = 1.0
    """JetStream must acknowledge a request within this time."""
    first_token_s: float = 60.0
    inter_token_s: float = 5.0
    """Judged by the scheduler; it travels in the request."""
    total_s: float = 3600.0
    silence_grace_s: float = 5.0
    """Beyond `first_token_s` without a word of a request the gateway ends it by itself."""
    keep_alive_s: float = 10.0
    """A quiet stream gets a comment line this often."""
    slow_reader_s: float = 30.0
    """A client that takes nothing for this long is disconnected."""
    resume_grace_s: float = RESUME_GRACE_S
    """How long an answer with resume intent goes on while nobody reads it."""
    max_kept: int = 1024
    """Answers that outlive their connection, read or not."""
    socket_life_s: float = 3600.0
    """A WebSocket takes no more turns after this time, and closes when the last is over."""
    socket_ping_s: float = 20.0
    """A WebSocket is pinged this often, and given up if its client does not answer as long."""
