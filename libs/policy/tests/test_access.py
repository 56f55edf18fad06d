import msgspec
import pytest

from diptych_contracts.audit import Action
from diptych_contracts.keys import ApiKey, Role, Tenant, is_tenant
from diptych_policy.access import (
    Right,
    Standing,
    anonymous,
    closes,
    is_loopback,
    may,
    right_of,
    standing,
)

KEY = ApiKey(key_id="k1", sha256="00", shown="dk-abcd", created_unix_ms=0)


@pytest.mark.parametrize(
    ("role", "rights"),
    [
        (None, {Right.LIST, Right.ASK, Right.LOOK}),
        (Role.USER, {Right.LIST, Right.ASK}),
        (Role.VIEWER, {Right.LIST, Right.LOOK, Right.ACCOUNT}),
        (Role.OPERATOR, {Right.LIST, Right.ASK, Right.LOOK, Right.ACCOUNT, Right.OPERATE}),
        (Role.ADMIN, set(Right)),
    ],
)
def test_what_a_role_may(role: Role | None, rights: set[Right]) -> None:
    assert {right for right in Right if may(role, right)} == rights


def test_every_audited_action_takes_a_right_that_no_caller_without_a_key_has() -> None:
    """Who has not shown a key cannot be named in an audit."""
    for action in Action:
        right = right_of(action)
        assert not may(None, right)
        assert not may(Role.USER, right)
        assert may(Role.ADMIN, right)
    operating = {action for action in Action if may(Role.OPERATOR, right_of(action))}
    assert operating == {Action.FLEET_SCALE, Action.DEAD_RETRY, Action.USAGE_READ}
    assert {a for a in Action if may(Role.VIEWER, right_of(a))} == {Action.USAGE_READ}


def test_what_closes_the_door_is_a_key_of_any_standing_or_a_purged_tenant() -> None:
    tenant = Tenant(tenant="acme", created_unix_ms=0)
    assert not closes(tenant)
    assert closes(KEY)
    assert closes(msgspec.structs.replace(KEY, revoked_unix_ms=1))
    assert closes(msgspec.structs.replace(KEY, expires_unix_ms=1))
    assert closes(Tenant(tenant="acme", created_unix_ms=0, purged_unix_ms=1))


def test_how_a_key_stands() -> None:
    from msgspec.structs import replace

    assert standing(KEY, None, now_unix_ms=10**15) is Standing.GOOD
    expiring = replace(KEY, expires_unix_ms=100)
    assert standing(expiring, None, now_unix_ms=99) is Standing.GOOD
    assert standing(expiring, None, now_unix_ms=100) is Standing.EXPIRED
    assert standing(replace(KEY, revoked_unix_ms=5), None, now_unix_ms=0) is Standing.REVOKED
    purged = Tenant(tenant="default", created_unix_ms=0, purged_unix_ms=1)
    assert standing(KEY, purged, now_unix_ms=0) is Standing.PURGED


def test_one_key_closes_the_door_whatever_else_is_said() -> None:
    assert anonymous(keys=0, loopback=True, allowed=False)
    assert anonymous(keys=0, loopback=False, allowed=True)
    assert not anonymous(keys=0, loopback=False, allowed=False)
    assert not anonymous(keys=1, loopback=True, allowed=True)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("name", ["default", "acme", "a", "acme-2_b"])
def test_names_of_tenants(name: str) -> None:
    assert is_tenant(name)


@pytest.mark.parametrize("name", ["", "Acme", "a.b", "a b", "-a", "a-", "a" * 65, "a\n", "ä", "a*"])
def test_what_names_no_tenant(name: str) -> None:
    assert not is_tenant(name)
