"""The priority class a body asks for."""

import re

from diptych_contracts.requests import PriorityClass
from diptych_gateway.judging.bodies import CommonBody, decode_tier
from diptych_gateway.judging.harmless import one_of, unsupported

_TIERS = {
    "auto": PriorityClass.INTERACTIVE,
    "default": PriorityClass.INTERACTIVE,
    "priority": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}
_DEFAULT_CLASS = PriorityClass.INTERACTIVE
_PEEKED_BYTES = 64 * 1024
"""Above it, looking would cost what a place is there to limit."""
_NAMED_CLASS = re.compile(rf'"priority_class"\s*:\s*"({"|".join(PriorityClass)})"'.encode())


def priority_class(body: CommonBody) -> PriorityClass:
    """The class that `diptych.priority_class` or else `service_tier` names."""
    tier = body.service_tier
    own = None if body.diptych is None else body.diptych.priority_class
    if tier is not None and tier not in _TIERS:
        raise unsupported("service_tier", tier, tuple(_TIERS))
    if own is not None:
        return one_of(PriorityClass, own, "diptych.priority_class")
    return _DEFAULT_CLASS if tier is None else _TIERS[tier]


def likely_class(data: bytes) -> PriorityClass:
    """The class of a small body that has no place yet; what is wrong with it is told later."""
    if len(data) > _PEEKED_BYTES:
        return _DEFAULT_CLASS
    tier = decode_tier(data)
    for named in _NAMED_CLASS.finditer(bytes(tier.diptych)):
        return PriorityClass(named[1].decode())
    return _TIERS.get(bytes(tier.service_tier).decode("latin-1").strip('"'), _DEFAULT_CLASS)
