"""A worker's KV tiers, as its settings say."""

from diptych_chassis.member import Member
from diptych_contracts.errors import Permanent
from diptych_kvtiers.stack import TierStack
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.device import Equipment
from diptych_worker.settings import WorkerSettings
from diptych_worker.tiering import Tiering


async def open_tiering(
    member: Member, settings: WorkerSettings, on: Equipment, blocks: AnnouncedBlocks
) -> Tiering | None:
    """The tiers, started; None: there are none.

    Raises:
        Permanent: this engine's KV cannot be kept in tiers, or a setting is wrong.
    """
    tiers = (*on.tiers,)
    if not tiers:
        return None
    spec = on.engine.spec
    if not spec.layout.slot_bytes:
        raise Permanent(f"KV_TIERS: {spec.engine} moves its KV itself; leave KV_TIERS empty")
    stack = TierStack(tiers)
    await stack.start()
    always, sightings = settings.kv_restore == "always", settings.kv_tier_sightings
    return Tiering(stack, spec, blocks, always=always, sightings=sightings)
