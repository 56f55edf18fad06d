"""As whom a command joins a bus: as told, or as the operator of the stack on this machine."""

import os
from pathlib import Path

from diptych_bus.access import Access
from diptych_cli import presence
from diptych_cli.failing import CliError
from diptych_contracts.errors import Permanent
from diptych_identity.authority import TRUST

IDENTITY, TRUSTED = "DIPTYCH_IDENTITY", "DIPTYCH_TRUST"


_chosen: list[Path] = []


def choose(identity: Path | None) -> None:
    """As whom this command joins, if the user says so."""
    _chosen[:] = [] if identity is None else [identity]


def access(url: str) -> Access:
    """The identity for the bus at `url`.

    Raises:
        CliError: none is known, or it is not what it should be.
    """
    if told := (_chosen and _chosen[0]) or os.environ.get(IDENTITY):
        identity = Path(told).expanduser()
        trust = Path(os.environ.get(TRUSTED) or identity.with_name(TRUST)).expanduser()
    elif (stack := presence.at(url)) is not None and stack.identity:
        identity, trust = Path(stack.identity), Path(stack.trust)
    else:
        raise CliError(
            f"the bus at {url} asks who you are: name your identity's file with --identity FILE "
            f"or {IDENTITY} (and what it trusts with {TRUSTED}, if that is not {TRUST} beside it)"
        )
    try:
        return Access(identity, trust)
    except Permanent as err:
        raise CliError(str(err)) from err
