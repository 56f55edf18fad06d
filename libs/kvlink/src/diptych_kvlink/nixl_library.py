"""Whether NIXL is installed here, and which network it may use. Imported when it is wanted only.

NIXL encrypts nothing and knows nobody: who holds an agent's metadata can read and write what that
agent has registered. So by default its UCX is held to loopback and to copies between processes.
Anything else has to be named, transports and devices: left to itself UCX listens on every network
and takes TCP without a word where RDMA is missing.
"""

import importlib
import importlib.util
import os
from typing import Any

from diptych_contracts.errors import Permanent

MODULES = ("nixl_cu12", "nixl_cu13")
LOOPBACK, ISOLATED = "loopback", "isolated"
TRANSPORTS, DEVICES = "UCX_TLS", "UCX_NET_DEVICES"
_OF_LOOPBACK = {TRANSPORTS: "tcp,cma", DEVICES: "lo"}
"""`tcp` carries control and is always needed; `cma` is one copy, from process to process."""


def why_absent() -> str:
    """Why NIXL cannot be used here; empty if it can."""
    if any(importlib.util.find_spec(name) is not None for name in MODULES):
        return ""
    return f"none of {' and '.join(MODULES)} is installed (make nixl; Linux only)"


def why_not_offered(network: str) -> str:
    """Why a worker offers no NIXL link on `network`; empty if it does."""
    absent = why_absent()
    if absent or network == LOOPBACK:
        return absent
    unset = [name for name in (TRANSPORTS, DEVICES) if not os.environ.get(name)]
    return f"{' and '.join(unset)} must name what the isolated network is" if unset else ""


def library(network: str) -> Any:
    """The library, its UCX held to `network`. To be called before the first agent is made.

    Raises:
        Permanent: it is absent, broken, or the environment names another network.
    """
    why = why_not_offered(network)
    if why:
        raise Permanent(f"no NIXL link: {why}")
    if network == LOOPBACK:
        _hold_to_loopback()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as err:
            raise Permanent(f"no NIXL link: {name} cannot be loaded: {err}") from err
    raise Permanent("no NIXL link: it has gone")


def _hold_to_loopback() -> None:
    for name, value in _OF_LOOPBACK.items():
        os.environ.setdefault(name, value)
    if os.environ[DEVICES] != _OF_LOOPBACK[DEVICES]:
        raise Permanent(
            f"no NIXL link: {DEVICES}={os.environ[DEVICES]} leaves this machine, where KV would "
            f"cross in the clear: set KV_NIXL={ISOLATED} if nobody else reaches that network"
        )
