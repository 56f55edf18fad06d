"""Whether gateways of a stack will open on its address, asked before anything is loaded."""

import os
from pathlib import Path

from diptych_cli.failing import CliError
from diptych_cli.identities import entries
from diptych_cli.joining import joined
from diptych_contracts.errors import Transient
from diptych_contracts.keys import ApiKey
from diptych_policy.access import is_loopback

_ALLOWED = "DIPTYCH_GATEWAY__ALLOW_ANONYMOUS"
_YES = ("1", "true", "yes", "on")


def is_harmless(host: str) -> bool:
    """Whether a gateway opens on `host` with or without API keys."""
    return is_loopback(host) or os.environ.get(_ALLOWED, "").lower() in _YES


def check_new(host: str, store: Path) -> None:
    """Raise `CliError` if the stack in `store` cannot have a key, never having run, but needs one.

    So nothing is fetched for it either.
    """
    if not is_harmless(host) and not (store / "nats").exists():
        raise CliError(_text(host))


async def refusal(url: str, host: str) -> str | None:
    """Why gateways would not open on `host` by what the bus at `url` holds; None: they will.

    A bus that does not answer is no reason: the gateways judge for themselves in the end.
    """
    try:
        async with joined(url) as bus:
            known = await entries(bus)
    except (CliError, Transient):
        return None
    return None if any(isinstance(entry, ApiKey) for entry in known) else _text(host)


def _text(host: str) -> str:
    return (
        f"refusing to listen on {host} without an API key: anybody who reaches it could use it. "
        "Run diptych up without --host, make a key there (diptych keys create --name first), then "
        f"come back; or set {_ALLOWED}=true if anybody may"
    )
