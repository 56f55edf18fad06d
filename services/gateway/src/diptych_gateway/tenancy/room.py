"""Keys, limits and what is used, put together."""

from dataclasses import dataclass

from diptych_chassis.member import Member
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.tenancy.administering import Administering
from diptych_gateway.tenancy.allowances import Allowances
from diptych_gateway.tenancy.auditing import Auditing
from diptych_gateway.tenancy.keyring import Keyring
from diptych_gateway.tenancy.metering import Metering


@dataclass(frozen=True, slots=True, kw_only=True)
class TenancyRoom:
    """What is known of who asks."""

    keyring: Keyring
    allowances: Allowances
    metering: Metering
    administering: Administering


def tenancy_room(member: Member, settings: GatewaySettings) -> TenancyRoom:
    """The room."""
    bus = member.bus
    keyring = Keyring(bus, host=settings.host, allowed=settings.allow_anonymous)
    return TenancyRoom(
        keyring=keyring,
        administering=Administering(bus, keyring, Auditing(bus, member.now_s, member.rng)),
        allowances=Allowances(bus, member.incarnation, member.now_s),
        metering=Metering(bus),
    )
