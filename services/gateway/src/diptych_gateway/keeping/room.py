"""Records, kept answers, and journals read by this gateway, put together."""

from collections.abc import Callable
from dataclasses import dataclass

from diptych_chassis.member import Member
from diptych_gateway.keeping.archive import Archive
from diptych_gateway.keeping.in_flight import InFlight
from diptych_gateway.keeping.keeper import Keeper
from diptych_gateway.keeping.records import Records
from diptych_gateway.keeping.resuming import Resumption
from diptych_policy.journal import RequestView


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingRoom:
    """What is under way, and what stays."""

    records: Records
    archive: Archive
    keeper: Keeper
    in_flight: InFlight
    resumption: Resumption


def keeping_room(
    member: Member, *, resume_grace_s: float, ended: Callable[[RequestView], None]
) -> KeepingRoom:
    """The room; `ended` hears of answers that end unread."""
    bus, me, now_s = member.bus, member.incarnation, member.now_s
    records, archive = Records(bus, me), Archive(bus)
    keeper = Keeper(records, archive, resume_grace_s=resume_grace_s, ended=ended)
    in_flight = InFlight(now_s, records, keeper)
    return KeepingRoom(
        records=records,
        archive=archive,
        keeper=keeper,
        in_flight=in_flight,
        resumption=Resumption(bus, me, in_flight=in_flight, keeper=keeper, now_s=now_s),
    )
