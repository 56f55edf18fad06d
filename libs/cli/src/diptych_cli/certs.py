"""`diptych certs`: keys, certificates and identities in a folder of their owner's only."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych_bus.permissions.granting import table
from diptych_cli.failing import CliError
from diptych_contracts.errors import Permanent
from diptych_identity import files, identity
from diptych_identity.authority import LOOPBACK, Authority
from diptych_identity.nkeys import Kind, is_public
from diptych_identity.roles import Role

_RELOAD = "a server that runs elsewhere reads it at SIGHUP; one of `diptych up`, within a second"


@dataclass(frozen=True, slots=True)
class Issued:
    """What is asked for."""

    role: str
    name: str
    ttl_s: float
    out: Path | None


def make(keys: Path, hosts: Sequence[str]) -> int:
    """A new authority."""
    try:
        made = Authority.make(keys.absolute(), table(), hosts=(*LOOPBACK, *hosts))
    except Permanent as err:
        raise CliError(str(err)) from err
    made.issue_operator()
    print(made.path)
    return 0


def issue(keys: Path, wanted: Issued) -> int:
    """A new identity, in a file of its own."""
    role = Role(wanted.role)
    name = wanted.name or f"{role.value}-{secrets.token_hex(6)}"
    try:
        made = _opened(keys).issuer(role).issue(name, ttl_s=wanted.ttl_s)
    except Permanent as err:
        raise CliError(str(err)) from err
    path = wanted.out or files.folder(keys / "issued") / f"{name}.creds"
    files.write(path.absolute(), made.text())
    print(path.absolute())
    return 0


def rotate(keys: Path, what: str, hosts: Sequence[str]) -> int:
    """A new certificate of the server, or a new signing key of a role."""
    authority = _opened(keys)
    if what == "server":
        authority.renew_server((*LOOPBACK, *hosts))
        print(f"the server has a new certificate; {_RELOAD}")
    else:
        authority.rotate(Role(what))
        print(
            f"{what}: a new key signs from now on; identities by the old one count until "
            f"`diptych certs retire {what}`; {_RELOAD}"
        )
    return 0


def retire(keys: Path, role: str) -> int:
    """The key before the last rotation counts no more."""
    _opened(keys).retire(Role(role))
    print(f"{role}: only identities by its newest key count; {_RELOAD}")
    return 0


def revoke(keys: Path, who: str) -> int:
    """An identity counts no more."""
    authority = _opened(keys)
    if is_public(who, Kind.USER):
        authority.revoke_key(who)
    else:
        try:
            authority.revoke_identity(identity.read(Path(who)))
        except Permanent as err:
            raise CliError(str(err)) from err
    print(f"revoked; {_RELOAD}")
    return 0


def _opened(keys: Path) -> Authority:
    if not (keys / "ca.key").exists():
        raise CliError(f"no keys in {keys}: make them with diptych certs make --keys {keys}")
    return Authority(keys.absolute(), table())
