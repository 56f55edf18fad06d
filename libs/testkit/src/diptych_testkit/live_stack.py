"""A real stack: nats-server, the real engine on real weights, each service its own process.

The server speaks TLS, and every process has an identity with the rights of its role.

Unlike `diptych up` nothing is restarted here, so a test can kill what it wants.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_testkit.guarded_nats import GuardedNats
from diptych_testkit.ports import free_port

GGUF_VARIABLE = "DIPTYCH_TEST_GGUF"
MODEL = "smollm2-135m"
READY_S = 300.0
"""A worker takes seconds; on two cores that thirty processes share, more than a minute."""
BUS_WAIT_S = 120.0
"""There, a scheduler found in 30 s no server that would say what it holds."""
STOP_S = 60.0
PROBE_S = 1.0
PAGE_S = 20.0
"""A page that does not come is taken for that of a dead process."""
KNOWN_S = 0.5
"""A scheduler counts on a worker from its first ready beat on: some beats after it is ready."""
COUNTED_S = 60.0
PATIENT = {
    "gateway": {"ACCEPT_S": "30", "INTER_TOKEN_S": "60", "TRANSFER_S": "60"},
    "scheduler": {"SILENCE_S": "4", "JOB_ANSWER_S": "20"},
}
"""Deadlines for whom they do not matter: a machine that others share may keep a process, or all of
them, from running for seconds, and by default a second of silence costs a worker its requests."""
_WORKERS = re.compile(rb'^diptych_scheduler_workers\{role="(\w+)"\} (\S+)', re.MULTILINE)


def gguf_path() -> Path:
    """The weights live tests run on. Raises, saying how to get them, if they are not here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    pulled = cache / "diptych/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    path = Path(os.environ.get(GGUF_VARIABLE) or pulled)
    if not path.is_file():
        raise FileNotFoundError(
            f"live tests need weights at {path}: run `diptych models pull {MODEL}` "
            f"or set {GGUF_VARIABLE}"
        )
    return path


class Process:
    """One service."""

    def __init__(
        self, service: str, folder: Path, environment: Mapping[str, str], *, module: str = ""
    ) -> None:
        self.service = service
        self.health_port = free_port()
        self.log = folder / f"{service}-{self.health_port}.log"
        health = f"DIPTYCH_{service.upper().replace('-', '_')}__HEALTH_PORT"
        command = (sys.executable, "-m", module or f"diptych_{service.replace('-', '_')}", service)
        tether = (sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--")
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                (*tether, *command),
                env={**os.environ, **environment, health: str(self.health_port)},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def readiness(self) -> dict[str, object]:
        """What its readiness probe says; empty while it does not listen."""
        status, body = self._asked("/health/ready", PROBE_S)
        return {**json.loads(body), "status": status} if body else {}

    def page(self, path: str) -> bytes:
        """What a page of its health port says, whatever the status; empty if nobody answers."""
        return self._asked(path, PAGE_S)[1]

    def _asked(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.health_port}{path}"
        try:
            try:
                with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as err:  # its body may not come in time either
                return err.code, err.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    @property
    def incarnation(self) -> str:
        """Its id on the bus; waits while it is too busy to say."""
        give_up_s = time.monotonic() + READY_S
        while time.monotonic() < give_up_s:
            said = self.readiness.get("incarnation")
            if said is not None:
                return str(said)
            time.sleep(0.05)
        raise AssertionError(f"{self.service} does not say who it is: {self.last_words()}")

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it serves; an early death shows its last words."""
        give_up_s = time.monotonic() + timeout_s
        while self.readiness.get("status") != 200:
            if self.popen.poll() is not None or time.monotonic() > give_up_s:
                raise AssertionError(f"{self.service} is not ready: {self.last_words()}")
            time.sleep(0.05)

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def signal(self, number: signal.Signals) -> None:
        """Send it a real signal."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.kill()
        self.popen.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM, SIGKILL if that does not help; gives the exit code."""
        self.ask_to_stop()
        return self.stopped()

    def ask_to_stop(self) -> None:
        """SIGTERM, once: a second one would break its drain off."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()

    def stopped(self) -> int:
        """Wait until it has stopped, SIGKILL if it does not; gives the exit code."""
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.popen.returncode


class LiveStack:
    """One nats-server and any number of services; workers compute with `engine`.

    Args:
        folder: For logs, keys and streams.
        engine: `llamacpp` or `sim`.
        patient: Whether services have the deadlines `PATIENT` instead of their own.
        settings: Of every service.
    """

    def __init__(
        self, folder: Path, *, engine: str = "llamacpp", patient: bool = False, **settings: str
    ) -> None:
        self.folder = folder
        self._engine = engine
        self._patience = PATIENT if patient else {}
        self.guarded = GuardedNats(folder / "bus", port=free_port()).start()
        self.nats = self.guarded.server
        self.port = free_port()
        self.processes: list[Process] = []
        self._settings = settings

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"http://127.0.0.1:{self.port}/v1"

    def environment(self, service: str, **settings: str) -> dict[str, str]:
        """The variables of one service."""
        variables = {**self.guarded.environment(service), "DIPTYCH_ALL__DRAIN_S": "3"}
        variables["DIPTYCH_ALL__BUS_WAIT_S"] = str(BUS_WAIT_S)
        own: dict[str, str] = dict(self._patience.get(service, {}))
        if service == "gateway":
            own["PORT"] = str(self.port)
        elif service.endswith("worker") and self._engine == "sim":
            own = {"ENGINE": "sim", "MODEL": MODEL}
        elif service.endswith("worker"):
            own = {"MODEL_PATH": str(gguf_path()), "MODEL": MODEL, "THREADS": "1"}
        prefix = f"DIPTYCH_{service.upper().replace('-', '_')}__"
        variables |= {f"DIPTYCH_ALL__{name}": value for name, value in self._settings.items()}
        return variables | {prefix + name: value for name, value in (own | settings).items()}

    @property
    def where(self) -> tuple[str, ...]:
        """What the commands are told, to find this stack as its operator."""
        identity = str(self.guarded.authority.issue_operator())
        return ("--nats-url", self.nats.url, "--identity", identity)

    async def join(self) -> JetStreamBus:
        """The bus, as somebody who may do everything."""
        return await self.guarded.join()

    async def client(self) -> IdentifiedClient:
        """A bare client of the server, as somebody who may do everything."""
        return await self.guarded.client()

    def start(self, service: str, *, module: str = "", **settings: str) -> Process:
        """Start a service, or `module` in its stead; it is not ready yet.

        On the main thread: Linux ends a tethered process with the *thread* that started it, and
        those of `asyncio.to_thread` end with the test.
        """
        environment = self.environment(service, **settings)
        process = Process(service, self.folder, environment, module=module)
        self.processes.append(process)
        return process

    def start_all(self, workers: Mapping[str, str] | None = None) -> None:
        """One of each, ready; both workers with the settings `workers`."""
        services = ("prefill-worker", "decode-worker", "scheduler", "power-governor", "gateway")
        started = [
            self.start(service, **(workers or {} if service.endswith("worker") else {}))
            for service in services
        ]
        for process in started:
            process.wait_ready()
        self.wait_for_model()

    def wait_for_model(self, timeout_s: float = READY_S) -> None:
        """Wait until the gateway lists the model and the scheduler knows the workers."""
        give_up_s = time.monotonic() + timeout_s
        while MODEL not in self._models():
            if time.monotonic() > give_up_s:
                raise AssertionError("the gateway does not list the model")
            time.sleep(0.05)
        time.sleep(KNOWN_S)
        counted_s = time.monotonic() + COUNTED_S
        while not self._counted() and time.monotonic() < counted_s:  # some may be frozen
            time.sleep(0.05)

    def _counted(self) -> bool:
        """Whether every scheduler counts on every worker that runs."""
        alive = [process for process in self.processes if process.popen.poll() is None]
        wanted = Counter(
            process.service.removesuffix("-worker")
            for process in alive
            if process.service.endswith("-worker")
        )
        schedulers = (process for process in alive if process.service == "scheduler")
        for page in [process.page("/metrics") for process in schedulers]:
            there = {role.decode(): float(count) for role, count in _WORKERS.findall(page)}
            if any(there.get(role, 0.0) < count for role, count in wanted.items()):
                return False
        return True

    def _models(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.base_url}/models", timeout=1) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def of(self, service: str) -> Process:
        """The newest running process of a service."""
        running = [p for p in self.processes if p.service == service and p.popen.poll() is None]
        return running[-1]

    def close(self) -> None:
        """Stop everything; all services at once, which takes a third of the time.

        Raises:
            AssertionError: somebody tried what the table of rights does not allow.
        """
        for process in self.processes:
            process.ask_to_stop()
        for process in self.processes:
            process.stopped()
        self.nats.stop_blocking()
        if tried := self.guarded.violations():
            raise AssertionError("beyond the table of rights:\n" + "\n".join(tried[:20]))
