"""Settings of a service: a frozen dataclass, read once from the environment.

`DIPTYCH_<SERVICE>__<NAME>` sets a field of one service, `DIPTYCH_ALL__<NAME>` one that every
service has. A variable under these prefixes that names no field, or whose value does not fit, stops
the start, and so does one of no service: a typing error must not become a silent default.
"""

import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diptych_chassis.settings_page import page
from diptych_contracts.errors import Permanent
from diptych_identity.roles import Role

EXIT_BAD_SETTINGS = 2
"""Starting again would not help: a supervisor does not try."""

_SHARED_PREFIX = "DIPTYCH_ALL__"
_ANY_PREFIX = re.compile(r"DIPTYCH_.*?__")
_BOOLS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLS |= {"0": False, "false": False, "no": False, "off": False}


class BadSettings(Permanent):
    """A variable that is unknown or malformed; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What every service can be told. A service's own settings extend it."""

    nats_url: str = "tls://127.0.0.1:4222"
    """Of the bus."""
    identity: Path | None = None
    """File of this process's identity (`diptych certs issue`); whoever issued it may renew it."""
    trust: Path | None = None
    """File of what is believed of others: `trust.pem` of the stack's keys."""
    bus_wait_s: float = 30.0
    """How long to wait for the bus at the start."""
    stream_replicas: int = 1
    """Servers of a NATS cluster that keep each stream and bucket; the first service to start
    decides. 3 survives the loss of a host."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged, from this level on."""
    log_format: Literal["json", "text"] = "json"
    """For machines, or for people."""
    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector; None exports no spans."""
    health_host: str = "127.0.0.1"
    """Address of `/health/*` and `/metrics`, which ask for no key: keep it inside."""
    health_port: int = 0
    """Port of `/health/*` and `/metrics`; 0 takes a free one and logs it."""
    core_dumps: bool = False
    """Whether a crash may leave a core file: it would hold prompts, keys and KV."""
    drain_s: float = 60.0
    """How long held work may take once asked to stop; 5 s later what is left is cut off.
    After SIGINT (Ctrl-C) at most 4 s."""


S = TypeVar("S", bound=ServiceSettings)


def read_settings(cls: type[S], service: str, environ: Mapping[str, str]) -> S:
    """The settings of `service`, or one clear line on standard error and exit code 2.

    Raises:
        SystemExit: a variable is unknown or malformed; or a page about all of them was asked for,
            by `--help`, and is printed.
    """
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        sys.stdout.write(described(cls, service))
        raise SystemExit(0)
    try:
        return parse_settings(cls, service, environ)
    except BadSettings as err:
        sys.stderr.write(f"{service}: {err}\n")
        raise SystemExit(EXIT_BAD_SETTINGS) from err


def described(cls: type[ServiceSettings], service: str) -> str:
    """Every setting of `service`: its variable, what it takes, its default, what it does."""
    shared = frozenset(field.name for field in fields(ServiceSettings))
    return page(cls, service, own_prefix=prefix(service), shared=shared, kinds=_described)


def parse_settings(cls: type[S], service: str, environ: Mapping[str, str]) -> S:
    """The settings of `service` (hyphenated, e.g. `prefill-worker`) out of `environ`.

    Raises:
        BadSettings: a variable is unknown or malformed, or a required one is missing.
    """
    own_prefix = prefix(service)
    _require_services(environ)
    shared = {field.name for field in fields(ServiceSettings)}
    own = {field.name for field in fields(cls)}
    values = _taken(environ, _SHARED_PREFIX, shared, get_type_hints(cls))
    values |= _taken(environ, own_prefix, own, get_type_hints(cls))
    _require(cls, values, own_prefix)
    try:
        return cls(**values)
    except ValueError as err:
        raise BadSettings(f"settings that do not fit together: {err}") from err


def prefix(service: str) -> str:
    """How the variables of `service` begin."""
    return f"DIPTYCH_{service.upper().replace('-', '_')}__"


def _require_services(environ: Mapping[str, str]) -> None:
    known = [_SHARED_PREFIX, *(prefix(role) for role in Role)]
    for variable in sorted(environ):
        start = _ANY_PREFIX.match(variable)
        if start and start.group() not in known:
            raise BadSettings(f"{variable} is of no service; known: {', '.join(known)}")


def _taken(
    environ: Mapping[str, str], start: str, names: set[str], hints: Mapping[str, Any]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(start)):
        name = variable.removeprefix(start).lower()
        if name not in names or variable != start + name.upper():
            known = ", ".join(sorted(field.upper() for field in names))
            raise BadSettings(f"{variable} is no setting; after {start} is known: {known}")
        values[name] = _parsed(variable, environ[variable], hints[name])
    return values


def _require(cls: type[S], values: Mapping[str, Any], own_prefix: str) -> None:
    for field in fields(cls):
        required = field.default is field.default_factory  # both are MISSING
        if required and field.name not in values:
            raise BadSettings(f"{own_prefix}{field.name.upper()} must be set")


def _parsed(variable: str, text: str, kind: Any) -> Any:
    try:
        return _value(text, kind)
    except (ValueError, KeyError) as err:
        raise BadSettings(f"{variable}: expected {_described(kind)}, got {text!r}") from err


def _value(text: str, kind: Any) -> Any:
    if kind in _PARSERS:
        return _PARSERS[kind](text)
    if get_origin(kind) is Literal:
        return _one_of(text, get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return None if text == "" else _value(text, _without_none(kind))
    if get_origin(kind) is tuple:
        return tuple(_value(part.strip(), get_args(kind)[0]) for part in text.split(",") if part)
    raise TypeError(f"settings cannot hold a {kind}")


def _one_of(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _without_none(kind: Any) -> Any:
    (rest,) = (arg for arg in get_args(kind) if arg is not types.NoneType)
    return rest


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:  # inf and nan
        raise ValueError(text)
    return number


def _filled(text: str) -> str:
    if not text:
        raise ValueError("empty")
    return text


_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: _filled,
    int: int,
    float: _finite,
    bool: lambda text: _BOOLS[text.lower()],
    Path: lambda text: Path(_filled(text)).expanduser(),
}

_NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}


def _described(kind: Any) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list with commas"
    return f"{_described(_without_none(kind))} or nothing"
