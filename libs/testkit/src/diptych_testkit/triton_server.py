"""A real Triton server, from the package that bundles it, with models of `triton_models`.

    python -m diptych_testkit.triton_server tests/triton

installs it, at most once per pin, in an environment of its own in the user's cache: its Python
backend needs numpy < 2 (with 2 it sends empty tensors and says nothing). Of `nvidia-pytriton`
nothing is imported, so its other requirements stay away. The backend embeds the interpreter of this
process, whose shared library it needs.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from diptych_testkit.ports import free_port
from diptych_testkit.triton_models.repository import Model, write

READY_S = 400.0
STOP_S = 60.0
MOST_ABORTS = 3
_INSTALL_S = 600.0
_SHARED_MEMORY = Path("/dev/shm")


class Installation:
    """The server that the hashes in `source` name."""

    def __init__(self, source: Path) -> None:
        self._pins = source / "hashes.txt"
        digest = hashlib.sha256(self._pins.read_bytes()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = cache / "diptych/triton" / digest

    @property
    def binary(self) -> Path:
        return self._server / "bin/tritonserver"

    @property
    def backends(self) -> Path:
        return self._server / "backends"

    @property
    def _server(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "venv/lib" / version / "site-packages/pytriton/tritonserver"

    @property
    def installed(self) -> bool:
        return (self.folder / ".installed").is_file()

    def install(self) -> None:
        """Install it if it is not there. Raises `RuntimeError` if it cannot run here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.installed:
                self._install()
                (self.folder / ".installed").touch()

    def _install(self) -> None:
        venv = self.folder / "venv"
        make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)]
        subprocess.run(make, check=True, timeout=_INSTALL_S)
        pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install"]
        quiet = ["-qq", "--disable-pip-version-check", "--no-compile"]
        checked = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(self._pins)]
        subprocess.run([*pip, *quiet, *checked], check=True, timeout=_INSTALL_S)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = "triton_python_backend_stub"
        source = self._server / "python_backend_stubs" / version / stub
        if not source.is_file():
            raise RuntimeError(f"the package has no stub for Python {version}")
        linked = subprocess.run(
            ["ldd", source], capture_output=True, text=True, check=True, env=self.environment()
        ).stdout
        if missing := [line.split()[0] for line in linked.splitlines() if "not found" in line]:
            raise RuntimeError(f"triton's Python backend needs {', '.join(missing)} (apt install)")
        shutil.copy(source, self.backends / "python" / stub)
        for path in (self.backends / "python" / stub, self.binary):
            path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """Variables with which the Python backend finds the interpreter and its environment.

        It must be this process's library and not another one's of the same version that the loader
        may know: a standard library's extensions fit only their own.
        """
        libraries = [str(sysconfig.get_config_var("LIBDIR")), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **os.environ,
            "PATH": f"{self.folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }


class TritonServer:
    """One server process with its models' processes."""

    def __init__(
        self, folder: Path, installation: Installation, *, transceiver: Path, explicit: bool = False
    ) -> None:
        self.folder = folder
        self.transceiver = transceiver
        self._installation = installation
        self._explicit = explicit
        self.http_port, self.grpc_port, self.metrics_port = (free_port() for _ in range(3))
        self.log = folder / "triton.log"
        self._prefix = f"diptych-{os.getpid()}-{self.grpc_port}-"
        self.popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def start(self, models: Sequence[Model]) -> "TritonServer":
        """Start it with `models`; it is not ready yet."""
        repository = self.folder / "models"
        for model in models:
            write(repository, model, transceiver=self.transceiver)
        self.run()
        return self

    def run(self) -> None:
        """Start the process, again too."""
        repository = self.folder / "models"
        repository.mkdir(exist_ok=True)
        loopback = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
        command = [
            *(sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--"),
            str(self._installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={self._installation.backends}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            *loopback,
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            "--exit-timeout-secs=10",
            # Its Python backend may abort where models are loaded side by side, and each twice
            # (first to complete its configuration): boost::interprocess::lock_exception.
            "--disable-auto-complete-config",
            "--model-load-thread-count=1",
            *(["--model-control-mode=explicit"] if self._explicit else []),
        ]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command,
                env=self._installation.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until all models are loaded; an early death shows its last words.

        Where its backend aborts for a lock of its own (see `run`) it is started again.
        """
        give_up_s, aborts = time.monotonic() + timeout_s, 0
        while not self.ready:
            assert self.popen is not None
            if self.popen.poll() == -signal.SIGABRT and aborts < MOST_ABORTS:
                aborts += 1
                self._end_group()
                self.run()
            if self.popen.poll() is not None or time.monotonic() > give_up_s:
                raise AssertionError(f"triton is not ready: {self.last_words()}")
            time.sleep(0.1)

    @property
    def ready(self) -> bool:
        url = f"http://127.0.0.1:{self.http_port}/v2/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, not to its models' processes."""
        assert self.popen is not None
        self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL for all of it, as when its container dies."""
        self._end_group()

    def stop(self) -> int:
        """SIGTERM, SIGKILL if that does not help; gives the exit code. Nothing is left running."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_S)
        self._end_group()
        return self.popen.returncode

    def _end_group(self) -> None:
        assert self.popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(STOP_S)
        for left in _SHARED_MEMORY.glob(f"{self._prefix}*"):  # what a killed one leaves
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    Installation(Path(sys.argv[1]).resolve()).install()
