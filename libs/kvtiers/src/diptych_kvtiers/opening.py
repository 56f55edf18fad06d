"""Tiers as a setting names them: the one module that knows all kinds.

What a kind needs is imported with its first tier: without the extra `tiers` a worker has memory,
disk and bus.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diptych_contracts.errors import Permanent
from diptych_kvtiers.bus_tier import BusTier, ObjectBus
from diptych_kvtiers.disk_tier import DiskTier
from diptych_kvtiers.host_tier import HostTier
from diptych_kvtiers.port import Tier
from diptych_kvtiers.specs import TierSpec


def make_tiers(specs: Sequence[TierSpec], *, bus: ObjectBus) -> list[Tier]:
    """A tier for each of `specs`; none of them is opened yet.

    Raises:
        Permanent: one cannot be made: what it needs is not installed, or it is set up wrongly.
    """
    return [_made(spec, bus) for spec in specs]


def _made(spec: TierSpec, bus: ObjectBus) -> Tier:
    timeout: dict[str, Any] = {} if spec.timeout_s is None else {"timeout_s": spec.timeout_s}
    budget_bytes = spec.budget_bytes or 0
    match spec.kind:
        case "host":
            return HostTier(budget_bytes)
        case "disk":
            return DiskTier(Path(spec.where), budget_bytes, **timeout)
        case "bus":
            return BusTier(bus, budget_bytes, **timeout)
    try:
        return _imported(spec, timeout)
    except ModuleNotFoundError as err:
        said = f"needs {err.name}: pip install 'diptych[tiers]'"
        raise Permanent(f"a tier of kind {spec.kind} {said}") from err
    except ValueError as err:
        raise Permanent(f"a tier of kind {spec.kind}: {err}") from err


def _imported(spec: TierSpec, options: dict[str, Any]) -> Tier:
    if spec.ttl_s is not None:
        options["ttl_s"] = spec.ttl_s
    match spec.kind:
        case "redis":
            from diptych_kvtiers.redis_tier import RedisTier

            return RedisTier(spec.where, **options)
        case "memcached":
            from diptych_kvtiers.memcached_tier import MemcachedTier

            place = urlsplit(spec.where)
            return MemcachedTier(place.hostname or "", place.port or 0, **options)
        case _:
            from diptych_kvtiers.object_tier import ObjectTier

            return ObjectTier(
                spec.where,
                budget_bytes=spec.budget_bytes,
                endpoint=spec.endpoint,
                region=spec.region,
                **options,
            )
