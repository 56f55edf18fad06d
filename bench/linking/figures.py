"""How the link benches print what they have seen."""

import os
import platform
import resource
import statistics
from pathlib import Path


def spread(values: list[float], digits: int = 2) -> str:
    """The median, and least and most."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def own_cpu_s() -> float:
    """What this process has taken so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def hardware() -> str:
    """What this runs on, and how busy it is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}; load {os.getloadavg()[0]:.1f}"
