"""A worker's KV tiers, as its settings say."""

from pathlib import Path

from diptych_chassis.member import Member
from diptych_contracts.errors import Permanent
from diptych_kvtiers.fleet_key import read_fleet_key
from diptych_kvtiers.opening import make_tiers
from diptych_kvtiers.specs import parse_tiers
from diptych_kvtiers.stack import StackLimits, TierStack
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.device import Equipment
from diptych_worker.settings import WorkerSettings
from diptych_worker.tiering import ALWAYS_S, Tiering


async def open_tiering(
    member: Member, settings: WorkerSettings, on: Equipment, blocks: AnnouncedBlocks
) -> Tiering | None:
    """The tiers, started; None: there are none.

    Raises:
        Permanent: this engine's KV cannot be kept in tiers, or a setting is wrong.
    """
    tiers = (*make_tiers(parse_tiers(settings.kv_tiers), bus=member.bus), *on.tiers)
    if not tiers:
        return None
    spec = on.engine.spec
    if not spec.layout.slot_bytes:
        raise Permanent(f"KV_TIERS: {spec.engine} moves its KV itself; leave KV_TIERS empty")
    always, sightings = settings.kv_restore == "always", settings.kv_tier_sightings
    limits = StackLimits(find_s=ALWAYS_S) if always else None
    stack = TierStack(tiers, fleet_key=_key(settings.kv_tier_key), limits=limits)
    await stack.start()
    return Tiering(stack, spec, blocks, always=always, sightings=sightings)


def _key(path: Path | None) -> bytes | None:
    try:
        return None if path is None else read_fleet_key(path)
    except ValueError as err:
        raise Permanent(f"KV_TIER_KEY: {err}") from err
