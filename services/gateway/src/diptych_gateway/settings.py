"""What an operator may set: `DIPTYCH_GATEWAY__<NAME>`."""

from dataclasses import dataclass

from diptych_chassis.settings import ServiceSettings
from diptych_gateway.class_deadlines import ClassDeadlines, Seconds, class_deadlines
from diptych_gateway.parser_settings import ParserSettings, parser_settings
from diptych_policy.attendance import RESUME_GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    host: str = "127.0.0.1"
    """Address to listen on; beyond this machine only with an API key."""
    port: int = 8080
    """Port to listen on; 0 takes a free one."""
    allow_anonymous: bool = False
    """While there is no API key, serve anybody who reaches `host`, beyond this machine too."""
    open_metrics: bool = False
    """Give `/metrics` to those without a key although there are keys: for scrapers in a network
    where nobody else is. It tells what each tenant uses."""
    reuse_port: bool = False
    """Let several gateways of one user on one machine share the port (SO_REUSEPORT): the kernel
    spreads connections over them. One that drains leaves the port first."""
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may use this gateway from a browser, `https://chat.example,...`; `*` is
    every one. None may by default."""
    record_prompts: bool = False
    """Write what clients say into spans (`gen_ai.input.messages`), for debugging: whoever reads
    the traces then reads the prompts. Logs never have them."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Of a body, and of a message on a WebSocket."""
    body_s: float = 30.0
    """How long a client may take to send its body."""
    max_bodies: int = 1024
    """Bodies being read at once; beyond it the one that has taken longest gives way."""
    max_in_flight: int = 256
    """Requests that are served at once; a further one is told 429."""
    max_connections: int = 4096
    """Open at once, WebSockets included; a further one is told 503."""
    max_sockets: int = 1024
    """WebSockets open at once."""
    default_max_tokens: int = 1024
    """Longest answer to a request without `max_tokens`: workers promise KV room for the whole
    answer, so the rest of the context would let two such requests fill a worker."""
    accept_s: Seconds = (1.0, 2.0, 5.0)
    """JetStream must acknowledge a request within this time. Deadlines have one value for every
    class, or three: interactive, standard, batch."""
    first_token_s: Seconds = (60.0, 300.0, 1800.0)
    """Judged by the scheduler, as are the next and the last; they travel in the request."""
    inter_token_s: Seconds = (5.0,)
    """From one token to the next; then another attempt."""
    transfer_s: Seconds = (10.0,)
    """From prefill's end to verified KV at the decode worker, judged by the prefill worker."""
    total_s: Seconds = (3600.0,)
    """Wall time; at most an hour, for which requests and their tokens are stored."""
    embeddings_s: float = 300.0
    """Longest time for the vectors of one request."""
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
    max_file_bytes: int = 200 * 1024 * 1024
    """Of an uploaded file."""
    max_uploads: int = 8
    """Files being uploaded at once."""
    max_downloads: int = 32
    """Files being read at once."""
    max_files: int = 1000
    """Of a tenant."""
    max_stored_bytes: int = 1024**3
    """Of all files of a tenant."""
    max_batch_lines: int = 50_000
    """Of the input file of a batch."""
    max_open_batches: int = 100
    """Of a tenant, those that are not over."""
    batches_at_once: int = 4
    """That this gateway runs."""
    batch_in_flight: int = 8
    """Lines of a batch that run at once; they take places among `max_in_flight`."""
    batch_window_s: float = 24 * 3600.0
    """After it a batch expires, with what is done."""
    socket_life_s: float = 3600.0
    """A WebSocket takes no more turns after this time, and closes when the last is over."""
    socket_ping_s: float = 20.0
    """A WebSocket is pinged this often, and given up if its client does not answer as long."""

    tool_parsers: str = ""
    """How models write calls of tools, where card and template do not say: `model=parser,…`."""
    reasoning_parsers: str = ""
    """How they mark reasoning, likewise. `none`: not at all."""

    def __post_init__(self) -> None:
        self.deadlines()
        self.parsers()

    def parsers(self) -> ParserSettings:
        """What is said of models. Raises `ValueError` for a parser there is none of."""
        return parser_settings(tools=self.tool_parsers, reasoning=self.reasoning_parsers)

    def deadlines(self) -> ClassDeadlines:
        """What each class is given. Raises `ValueError` if the settings do not make sense."""
        return class_deadlines(
            accept_s=self.accept_s,
            first_token_s=self.first_token_s,
            inter_token_s=self.inter_token_s,
            transfer_s=self.transfer_s,
            total_s=self.total_s,
        )
