"""A server that knows who is who: joining, renewal, rotation, revocation."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_contracts.errors import BusAway
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import TESTER, GuardedNats, guarded_nats


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path_factory.mktemp("nats")) as nats:
        yield nats


@pytest.mark.parametrize("role", list(Role))
async def test_every_role_joins(nats: GuardedNats, role: Role) -> None:
    before = nats.violations()
    bus = await nats.join(role)
    await bus.close()
    assert nats.violations() == before


async def refused(url: str, access: Access, why: str) -> None:
    """A connection is refused, and says why; a busy machine may not get that far at once."""
    told = ""
    for wait_s in (1.0, 10.0, 60.0):
        with pytest.raises(BusAway) as caught:
            await JetStreamBus.connect(url, name="stranger", wait_s=wait_s, access=access)
        told = str(caught.value)
        if why in told:
            return
    raise AssertionError(f"expected {why!r} in: {told}")


async def test_a_plain_connection_is_not_answered(nats: GuardedNats) -> None:
    plain = nats.url.replace("tls://", "nats://")
    with pytest.raises(BusAway):
        await JetStreamBus.connect(plain, name="stranger", wait_s=1.0)


async def test_another_stack_s_identity_is_refused(nats: GuardedNats, tmp_path: Path) -> None:
    other = GuardedNats(tmp_path)
    access = other.access(TESTER)
    access.trust = nats.access(TESTER).trust  # it knows the server, but the server does not know it
    await refused(nats.url, access, "Authorization Violation")


async def test_another_stack_s_server_is_refused(nats: GuardedNats, tmp_path: Path) -> None:
    access = nats.access(TESTER)
    access.trust = GuardedNats(tmp_path).access(TESTER).trust
    await refused(nats.url, access, "certificate verify failed")


async def test_an_expired_identity_is_refused(nats: GuardedNats) -> None:
    access = nats.access(TESTER, ttl_s=1)
    await asyncio.sleep(2.1)
    await refused(nats.url, access, "Authorization Violation")
