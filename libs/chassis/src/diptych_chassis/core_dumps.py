"""Core files hold prompts, keys and KV: a process leaves none unless its operator wants one."""

import sys


def leave_none() -> None:
    """Have the kernel write no core file of this process; Windows writes none."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
