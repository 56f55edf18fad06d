"""Run a command that dies with its parent: `python -m diptych_chassis.tether PID -- command…`.

The kernel kills this process when its parent dies, even if the parent was killed outright, so a
supervisor leaves no orphans. Linux only (`prctl(PR_SET_PDEATHSIG)`); elsewhere the command simply
runs. The setting survives `exec`, so the command keeps this process's id.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_USAGE = "usage: python -m diptych_chassis.tether PID -- command…"


def main(arguments: list[str]) -> int:
    """Tie this process to its parent and become the command."""
    if len(arguments) < 3 or arguments[1] != "--" or not arguments[0].isdigit():
        sys.stderr.write(_USAGE + "\n")
        return 2
    parent, command = int(arguments[0]), arguments[2:]
    # A shell that runs us in the background lets us ignore it, and that survives `exec` too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        _die_with_parent()
        if os.getppid() != parent:  # it died before the kernel knew of our wish
            return 1
    try:
        os.execvp(command[0], command)
    except OSError as err:
        sys.stderr.write(f"cannot run {command[0]}: {err.strerror}\n")
        return 127


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
