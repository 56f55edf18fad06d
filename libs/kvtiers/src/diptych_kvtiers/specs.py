"""Which tiers a worker has, as its setting says (pure).

    host:2GiB                        this process's memory
    disk:20GiB:/path                 files; workers of a host may share the directory
    redis://host:6379                Redis or Valkey; rediss:// with TLS
    memcached://host:11211
    s3://bucket/prefix               and gs://, az://; file:///path is a directory on a network
    bus:1GiB                         the bus's object store

Fastest first. A URL may end in options: `?budget=1TiB` (of an object store), `ttl=24h` (Redis,
memcached), `timeout=0.5` (seconds, all), `endpoint=http://host:9000`, `region=…` (S3).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from diptych_contracts.streams import KV_BLOCKS_BYTES

Kind = Literal["host", "disk", "bus", "object", "redis", "memcached"]

MAX_TIERS = 8
MIN_BUDGET_BYTES = 1024**2
MAX_BUDGET_BYTES = 1024**5
MAX_SPEC_CHARS = 2000

_SCHEMES: dict[str, Kind] = {
    **dict.fromkeys(("s3", "gs", "az", "file", "memory"), "object"),
    **dict.fromkeys(("redis", "rediss"), "redis"),
    "memcached": "memcached",
}
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "object": ("budget", "timeout", "endpoint", "region"),
    "redis": ("ttl", "timeout"),
    "memcached": ("ttl", "timeout"),
}
_SIZE = re.compile(r"([0-9]{1,15})(?:(?:([KMGT])(i?))?B)?")
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {("", ""): 1}
_UNITS |= {("", letter): 1000 ** (n + 1) for n, letter in enumerate("KMGT")}
_UNITS |= {("i", letter): 1 << 10 * (n + 1) for n, letter in enumerate("KMGT")}
_SPANS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_TTL_S = 30 * 86_400  # memcached takes more for a date
_MAX_TIMEOUT_S = 60.0
_FORMS = (
    "host:SIZE, disk:SIZE:/path, bus:SIZE, redis://HOST:PORT, memcached://HOST:PORT, "
    "s3://BUCKET/PREFIX, gs://, az:// or file:///path"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier."""

    kind: Kind
    where: str = field(default="", repr=False)
    """A path, or a URL without options; it may hold a password."""
    budget_bytes: int | None = None
    ttl_s: int | None = None
    timeout_s: float | None = None
    endpoint: str = ""
    region: str = ""


def parse_tiers(parts: Iterable[str]) -> tuple[TierSpec, ...]:
    """The tiers that `parts` name, e.g. `("host:2GiB", "disk:20GiB:/kv")`.

    Raises:
        ValueError: says which one, what was expected and what was seen, without passwords.
    """
    specs = tuple(parse_tier(part.strip()) for part in parts if part.strip())
    if len(specs) > MAX_TIERS:
        raise ValueError(f"expected at most {MAX_TIERS} tiers, got {len(specs)}")
    places = [(spec.kind, spec.where) for spec in specs]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"expected each tier once, got {place[0]} {shown(place[1])} twice")
    return specs


def parse_tier(text: str) -> TierSpec:
    """One tier. Raises as `parse_tiers`."""
    if len(text) > MAX_SPEC_CHARS:
        raise ValueError(f"a tier: expected {MAX_SPEC_CHARS} characters at most, got {len(text)}")
    if "://" in text:
        return _remote(text)
    kind, _, rest = text.partition(":")
    size, _, path = rest.partition(":")
    match kind:
        case "host" if not path:
            return TierSpec(kind="host", budget_bytes=_size(text, size))
        case "bus" if not path:
            return TierSpec(kind="bus", budget_bytes=_on_the_bus(text, size))
        case "disk" if path.startswith("/") and "\0" not in path:
            return TierSpec(kind="disk", where=path, budget_bytes=_size(text, size))
    raise ValueError(f"expected a tier such as {_FORMS}; got {shown(text)!r:.200}")


def shown(where: str) -> str:
    """A place without user, password and options, however odd; a path that has no "@" as it is."""
    if where.startswith("/") and "://" not in where:
        _, at, rest = where.rpartition("@")
        return f"…{at}{rest}" if at else where
    scheme, found, rest = where.rpartition("@")[2].partition("://")
    if "@" in where:
        scheme, found, rest = where.partition("://")[0], "://", where.rpartition("@")[2]
        if ":" in scheme or "@" in scheme:
            scheme = "…"
    return f"{scheme}{found}{rest.partition('?')[0].partition('#')[0]}"


def _remote(text: str) -> TierSpec:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"expected a URL; {shown(text)!r} is none") from None
    kind = _SCHEMES.get(parts.scheme)
    if kind is None:
        raise ValueError(f"expected a tier such as {_FORMS}; got {shown(text)!r:.200}")
    if parts.fragment or any(ord(char) <= 32 or ord(char) == 127 for char in text):
        raise ValueError(f"{shown(text)!r:.200}: expected no fragment, space or control character")
    _check_place(kind, parts, port)
    options = _options(kind, parts)
    return TierSpec(
        kind=kind,
        where=text.partition("?")[0].rstrip("/") if kind == "object" else text.partition("?")[0],
        budget_bytes=_size(shown(text), options["budget"]) if "budget" in options else None,
        ttl_s=_span(shown(text), options["ttl"]) if "ttl" in options else None,
        timeout_s=_timeout(shown(text), options["timeout"]) if "timeout" in options else None,
        endpoint=_endpoint(shown(text), options.get("endpoint", "")),
        region=options.get("region", ""),
    )


def _check_place(kind: Kind, parts: SplitResult, port: int | None) -> None:
    said = shown(parts.geturl())
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError(f"expected file:///path, got {said!r:.200}")
    elif parts.scheme != "memory" and not parts.hostname:
        what = "a bucket" if kind == "object" else "a host"
        raise ValueError(f"expected {what} after {parts.scheme}://, got {said!r:.200}")
    if kind == "memcached" and (port is None or parts.path.strip("/") or "@" in parts.netloc):
        raise ValueError(f"expected memcached://HOST:PORT, got {said!r:.200}")
    if kind == "object" and ("@" in parts.geturl() or ".." in parts.path.split("/")):
        raise ValueError(f"expected a bucket and a plain prefix, got {said!r:.200}")
    if kind == "redis" and not re.fullmatch(r"(/[0-9]{0,5})?", parts.path):
        raise ValueError(f"expected the number of a database as path, got {said!r:.200}")


def _options(kind: Kind, parts: SplitResult) -> dict[str, str]:
    said = shown(parts.geturl())
    known = _OPTIONS[kind]
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known or name in found:
            raise ValueError(f"{said}: expected the options {', '.join(known)}, once each")
        found[name] = value
    if len(found) != (parts.query.count("&") + 1 if parts.query else 0):
        raise ValueError(f"{said}: expected options such as timeout=0.5")
    return found


def _size(said: str, text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is not None:
        number, power, binary = match.groups()
        n_bytes = int(number) * _UNITS[binary or "", power or ""]
        if MIN_BUDGET_BYTES <= n_bytes <= MAX_BUDGET_BYTES:
            return n_bytes
    raise ValueError(f"{said}: expected a size from 1MiB to 1024TiB, got {shown(text)!r:.50}")


def _on_the_bus(said: str, text: str) -> int:
    n_bytes = _size(said, text)
    if n_bytes > KV_BLOCKS_BYTES:
        raise ValueError(f"{said}: the bus keeps {KV_BLOCKS_BYTES >> 30} GiB at most")
    return n_bytes


def _span(said: str, text: str) -> int:
    match = _SPAN.fullmatch(text)
    if match is not None:
        seconds = int(match[1]) * _SPANS_S[match[2]]
        if 1 <= seconds <= _MAX_TTL_S:
            return seconds
    raise ValueError(f"{said}: expected a time to live from 1s to 30d, got {shown(text)!r:.50}")


def _timeout(said: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) and 0.01 <= float(text) <= _MAX_TIMEOUT_S:
        return float(text)
    raise ValueError(
        f"{said}: expected a timeout from 0.01 to 60 (seconds), got {shown(text)!r:.50}"
    )


def _endpoint(said: str, text: str) -> str:
    if text and not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+/?", text):
        raise ValueError(f"{said}: expected an endpoint such as https://host:9000")
    return text
