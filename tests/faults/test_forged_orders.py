"""A worker of a whole fleet changes its cap for its governor alone."""

import asyncio
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import pytest

from diptych_bus.access import Access
from diptych_chassis.member import Member
from diptych_chassis.orders import Orders
from diptych_contracts import subjects
from diptych_contracts.fleet import Role as WorkerRole
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Signed
from diptych_contracts.power import PowerSetPoint
from diptych_identity import files
from diptych_identity.authority import Authority
from diptych_identity.claims import Permissions
from diptych_identity.roles import Role
from diptych_power_governor.app import serve
from diptych_power_governor.settings import GovernorSettings
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

pytestmark = pytest.mark.virtual_time
BUDGET_W = 300.0
LEASE_S = 10.0


class Stack:
    """A fleet whose members have identities."""

    def __init__(self, fleet: SmallFleet, folder: Path) -> None:
        self.fleet = fleet
        self._folder = folder
        self._authority = Authority.make(folder / "certs", dict.fromkeys(Role, Permissions((), ())))
        self._member = fleet._member
        fleet._member = self._identified  # type: ignore[method-assign]

    def _identified(self, service: str, name: str) -> tuple[Member, Context]:
        member, context = self._member(service, name)
        return replace(member, access=self.access(Role(service), member.incarnation)), context

    def access(self, role: Role, name: str) -> Access:
        path = self._folder / f"{name}.creds"
        files.write(path, self._authority.issuer(role).issue(name).text())
        return Access(path, self._authority.trust)

    def order(
        self, role: Role, name: str, *, cap_w: float, epoch: int, as_role: str = ""
    ) -> Signed:
        worker = self.fleet.incarnation("d1")
        access = self.access(role, name)
        orders = Orders(
            Incarnation(name),
            as_role or role.value,
            unix_ms=self.fleet.bus.unix_ms,
            identity=lambda: access.identity,
        )
        return orders.signed(
            subjects.power(worker), point(worker, name, cap_w), epoch=epoch, valid_ms=10_000
        )

    async def cap_w(self) -> float:
        await self.fleet.until_load(lambda: True)
        return self.fleet.loads["d1"].cap_w


def point(worker: Incarnation, governor: str, cap_w: float) -> PowerSetPoint:
    return PowerSetPoint(
        governor=Incarnation(governor),
        worker=worker,
        sequence=1,
        cap_w=cap_w,
        lease_ms=round(LEASE_S * 1000),
    )


async def test_only_the_governor_that_leads_changes_a_cap(tmp_path: Path) -> None:
    async with small_fleet() as fleet:
        stack = Stack(fleet, tmp_path)
        fleet.scheduler()
        fleet.worker("d1", WorkerRole.DECODE, engine=ToyStepEngine())
        await fleet.ready()
        default_w = await stack.cap_w()
        assert default_w > BUDGET_W

        subject = subjects.power(fleet.incarnation("d1"))
        thief = stack.order(Role.DECODE_WORKER, "decode-worker-9", cap_w=250.0, epoch=10**9)
        liar = stack.order(
            Role.DECODE_WORKER,
            "power-governor-9",
            cap_w=250.0,
            epoch=10**9,
            as_role="power-governor",
        )
        bare = point(fleet.incarnation("d1"), "power-governor-9", 250.0)
        for forged in (thief, liar, bare):
            await fleet.bus.publish(subject, forged)
        assert await stack.cap_w() == default_w

        settings = GovernorSettings(budget_w=BUDGET_W, tick_s=0.1, lease_s=LEASE_S)
        fleet.join("power-governor", "pg", lambda member: serve(member, settings))
        await fleet.ready("pg")
        while await stack.cap_w() != BUDGET_W:
            await asyncio.sleep(0.1)

        old = stack.order(Role.POWER_GOVERNOR, "power-governor-0", cap_w=default_w, epoch=0)
        for forged in (thief, liar, bare, old):
            await fleet.bus.publish(subject, forged)
        assert await stack.cap_w() == BUDGET_W
