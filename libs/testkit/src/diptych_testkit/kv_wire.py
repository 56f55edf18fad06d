"""A bad network between two network namespaces: loss, delay, and a cut, packet by packet.

    python -m diptych_testkit.kv_wire           (as root, on Linux with /dev/net/tun)

Makes two nameless namespaces, each with one end of a wire whose packets this process carries, and
tells how to enter them. They are gone when it and who entered them have ended, however that comes.
The kernel needs no `netem` (many have none). Reads settings as JSON, one a line.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "wire0"
_MTU = 9000
_NEW_NETWORK = 0x40000000
_SET_TUN, _TUN, _BARE = 0x400454CA, 0x0001, 0x1000
_MOST_WAITING = 4000
"""Packets on their way; what comes beyond is dropped, as by any queue."""


def why_not() -> str:
    """Why there can be no wire here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} are not installed"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "network namespaces are not permitted here"


class Wire:
    """The wire's process, seen from a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "there is no wire"
        self._descriptors: list[int] = json.loads(line)

    def within(self, end: int) -> Sequence[str]:
        """What a command must begin with to run at an end, with that end's /sys."""
        network = f"--net=/proc/{self._process.pid}/fd/{self._descriptors[end]}"
        own = 'mount -t sysfs sysfs /sys && exec "$0" "$@"'
        return ("nsenter", network, "unshare", "--mount", "sh", "-c", own)

    def set(self, *, loss: float = 0.0, delay_s: float = 0.0, cut: bool = False) -> None:
        """From now on: the share of packets lost, how long one takes one way, or none arrive."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"loss": loss, "delay_s": delay_s, "cut": cut}) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    def close(self) -> None:
        """End it."""
        with self._process:
            self._process.kill()


def main() -> None:
    """Carry packets until the input ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    networks, ends = zip(*(_end(libc.unshare, address) for address in ADDRESSES), strict=True)
    _say(networks)
    settings: dict[str, Any] = {"loss": 0.0, "delay_s": 0.0, "cut": False}
    rng, count = random.Random(7), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *ends], [], [], wait_s)
        now_s = time.monotonic()
        for end in ready:
            if end == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                settings = json.loads(line)
                _say("so it is")
                continue
            packet = os.read(end, 1 << 16)
            lost = settings["cut"] or rng.random() < settings["loss"]
            if not lost and len(waiting) < _MOST_WAITING:
                count += 1
                due_s = now_s + settings["delay_s"]
                heapq.heappush(waiting, (due_s, count, ends[1 - ends.index(end)], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            if not settings["cut"]:
                os.write(end, packet)


def _end(unshare: Callable[[int], int], address: str) -> tuple[int, int]:
    """A fresh namespace, and this process's end of its wire."""
    if unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    wire = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(wire, _SET_TUN, struct.pack("16sH22x", DEVICE.encode(), _TUN | _BARE))
    for command in (
        "link set lo up",
        f"link set {DEVICE} mtu {_MTU} up",
        f"address add {address}/24 dev {DEVICE}",
    ):
        subprocess.run(["ip", *command.split()], check=True, stdin=subprocess.DEVNULL)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY), wire


def _say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
