"""What operator, account and user tokens say, in NATS's own words.

One account holds the stack. For each role it names *scoped* signing keys: whoever holds one may
issue users, and all they may do is the role's template, `{{name()}}` being the user's name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from diptych_identity.roles import Role

_VERSION = 2
_NS = 1_000_000_000
_UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
NAME = "{{name()}}"
"""In a template: the name of the user, which is its process's incarnation."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What users of a role may do on the server, by subject; nothing else is allowed."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers_within_s: float = 0.0
    """How long after a request its answer may be published; 0: it answers nobody."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A signing key of a role."""

    role: Role
    public: str
    permissions: Permissions


def operator(system_account: str) -> dict[str, Any]:
    """Of the operator: who may sign accounts, and which is the server's own."""
    return {"type": "operator", "version": _VERSION, "system_account": system_account}


def account(
    scopes: Iterable[Scope], *, revoked: Mapping[str, int], jetstream: bool = True
) -> dict[str, Any]:
    """Of an account: its roles' signing keys, and who is revoked since when."""
    limits: dict[str, Any] = {
        **_UNLIMITED,
        "imports": -1,
        "exports": -1,
        "wildcards": True,
        "conn": -1,
        "leaf": -1,
    }
    if jetstream:
        limits |= {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    return {
        "type": "account",
        "version": _VERSION,
        "limits": limits,
        "default_permissions": {"pub": {"deny": [">"]}, "sub": {"deny": [">"]}},
        "signing_keys": [_scope(scope) for scope in scopes],
        "revocations": dict(revoked),
    }


def user(account_public: str) -> dict[str, Any]:
    """Of a user: only whose it is; the rest is its scope's."""
    return {"type": "user", "version": _VERSION, "issuer_account": account_public}


def _scope(scope: Scope) -> dict[str, Any]:
    told = scope.permissions
    template: dict[str, Any] = {
        "pub": {"allow": list(told.publish)} if told.publish else {"deny": [">"]},
        "sub": {"allow": list(told.subscribe)} if told.subscribe else {"deny": [">"]},
        **_UNLIMITED,
    }
    if told.answers_within_s:
        template["resp"] = {"max": 1, "ttl": int(told.answers_within_s * _NS)}
    return {
        "kind": "user_scope",
        "key": scope.public,
        "role": scope.role.value,
        "template": template,
    }
