"""Where a `tcp` reader is: what stands in its endpoint's address.

    host:port/reader/key        [::1]:7000/decode-worker-9f3a61c2a0b1/0011…

The key lets in whoever could read the endpoint on the bus. It is no encryption: that, and who is
who, is TLS's, whose certificates travel beside the address. Without TLS it is all there is.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass

from diptych_contracts.errors import Incompatible, Permanent


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """An address, taken apart."""

    host: str
    port: int
    reader: str
    key: bytes

    def __str__(self) -> str:
        return f"{self.where}/{self.reader}/{self.key.hex()}"

    @property
    def where(self) -> str:
        """Host and port: what may be logged."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, address: str) -> "TcpAddress":
        """`address`, taken apart. Raises `Incompatible`."""
        try:
            where, reader, key = address.split("/")
            host, _, port = where.rpartition(":")
            parsed = cls(
                host.removeprefix("[").removesuffix("]"), int(port), reader, bytes.fromhex(key)
            )
        except ValueError as err:
            raise Incompatible("expected a KV address host:port/reader/key") from err
        if not (parsed.host and parsed.reader and 0 < parsed.port < 65536 and _plain(address)):
            raise Incompatible("expected a KV address host:port/reader/key")
        return parsed


def _plain(address: str) -> bool:
    """Whether it is visible ASCII, its names of a length that names have."""
    where = address.split("/")[0]
    host = where.rpartition(":")[0]
    bracketed = host.startswith("[") and host.endswith("]")
    paired = not set("[]") & set(host[1:-1] if bracketed else host)
    visible = paired and all("!" <= char <= "~" for char in address)
    return visible and len(address) <= 512 and all(len(p) < 64 for p in re.split("[.:]", where))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether a listener on `host` is reached over every network of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def announced_host(host: str) -> str:
    """What others are told for a listener on `host`: this machine's own address for a wildcard.

    Raises:
        Permanent: a wildcard, and the machine's name leads nowhere.
    """
    if not is_wildcard(host):
        return host
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError as err:
        raise Permanent(f"cannot tell which address of {host} others reach: {err}") from err
    if is_loopback(own):
        raise Permanent(
            f"cannot tell which address of {host} others reach: this machine's name "
            f"{socket.gethostname()!r} means {own}; name the address to listen on"
        )
    return own
