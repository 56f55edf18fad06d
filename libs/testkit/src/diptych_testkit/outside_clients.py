"""Clients that others wrote, installed away from this checkout and run as their users run them.

    python -m diptych_testkit.outside_clients tests/clients

Python packages (`python/requirements.txt`) get a virtual environment of their own, because their
requirements may contradict ours; npm packages (`npm/package.json`) get a folder beside it, and the
Node that runs them comes from the same requirements. What arrives is compared with the digests in
`python/hashes.txt` and `npm/package-lock.json`. Both stand in the user's cache, under the digest of
their pins: a changed pin is another folder.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PINS = ("python/hashes.txt", "npm/package.json", "npm/package-lock.json")
_INSTALL_S = 600.0
RUN_S = 500.0


@dataclass(frozen=True, slots=True)
class OutsideClients:
    """What is installed for the pins in `source`."""

    source: Path

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        digest = hashlib.sha256()
        for name in PINS:
            digest.update((self.source / name).read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "diptych/clients" / digest.hexdigest()[:12]

    @property
    def installed(self) -> bool:
        """Whether everything is there."""
        return self._stamp.is_file()

    @property
    def _stamp(self) -> Path:
        return self.folder / ".installed"

    def command(self, name: str) -> str:
        """The path of a command that the packages brought."""
        return str(self.folder / "venv/bin" / name)

    def install(self) -> None:
        """Install what is not there yet. Raises `subprocess.CalledProcessError` if that fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.installed:
                self._install()
                self._stamp.touch()

    def _install(self) -> None:
        venv = self.folder / "venv"
        requirements = str(self.source / PINS[0])
        _do([sys.executable, "-m", "venv", "--clear", str(venv)], self.folder)
        pip = [self.command("python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        checked = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        _do([*pip, *checked, "-r", requirements], self.folder)
        for name in PINS[1:]:
            shutil.copy(self.source / name, self.folder)
        npm = [self.command("npm"), "ci", "--silent", "--no-audit", "--no-fund"]
        _do([*npm, "--ignore-scripts"], self.folder, self.environment())

    def environment(self, **more: str) -> dict[str, str]:
        """The variables a client is given: its own commands first, none of ours."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OPENAI_"))}
        path = f"{self.folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": path, **more}

    def run_python(self, script: str, folder: Path, **environment: str) -> str:
        """What the Python client `script` prints; see `run`."""
        path = str(self.source / "python" / script)
        return self.run([self.command("python"), path], folder, environment)

    def run_node(self, script: str, folder: Path, **environment: str) -> str:
        """What the JavaScript client `script` prints; it finds the npm packages. See `run`."""
        modules = folder / "node_modules"
        if not modules.exists():
            modules.symlink_to(self.folder / "node_modules")
        path = shutil.copy(self.source / "npm" / script, folder)
        return self.run([self.command("node"), str(path)], folder, environment)

    def run(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> str:
        """What `command` prints, run in `folder`.

        Raises:
            AssertionError: it failed; says what it wrote.
        """
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment(**(environment or {})),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if done.returncode:
            words = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            raise AssertionError(f"{command[-1]} gave {done.returncode}:\n{words}")
        return done.stdout


def _do(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=_INSTALL_S)


if __name__ == "__main__":
    OutsideClients(Path(sys.argv[1]).resolve()).install()
