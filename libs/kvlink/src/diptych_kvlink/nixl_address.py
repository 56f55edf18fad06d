"""Where a `nixl` reader is: its agent, and where in that agent's memory its slots and gates lie.

    agent/slots/stride/gates/metadata        decode-worker-9f3a.1c2d3e4f/7f…/2000/7f…/…

All numbers are hexadecimal. The metadata is a secret: with it one reads and writes the slots. It
stands in tickets, for the writer that one was given to; what a worker publishes ends at the agent.
"""

from dataclasses import dataclass

import msgspec

from diptych_contracts.errors import Incompatible
from diptych_contracts.transfers import LinkEndpoint

KIND = "nixl"
_MOST_CHARS = 140_000
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """An address, taken apart."""

    agent: str
    slots: int
    stride_bytes: int
    gates: int
    metadata: bytes

    def __str__(self) -> str:
        numbers = f"{self.slots:x}/{self.stride_bytes:x}/{self.gates:x}"
        return f"{self.agent}/{numbers}/{self.metadata.hex()}"

    @classmethod
    def parse(cls, address: str) -> "NixlAddress":
        """`address`, taken apart. Raises `Incompatible`."""
        try:
            if len(address) > _MOST_CHARS:
                raise ValueError
            agent, slots, stride, gates, metadata = address.split("/")
            parsed = cls(
                agent, int(slots, 16), int(stride, 16), int(gates, 16), bytes.fromhex(metadata)
            )
        except ValueError as err:
            raise Incompatible("expected a NIXL address agent/slots/stride/gates/metadata") from err
        numbers = (parsed.slots, parsed.stride_bytes, parsed.gates)
        plain = agent.isascii() and agent.isprintable() and 0 < len(agent) <= 128
        if not (plain and metadata and all(0 < number < _MOST for number in numbers)):
            raise Incompatible("expected a NIXL address agent/slots/stride/gates/metadata")
        return parsed


def published(endpoint: LinkEndpoint) -> LinkEndpoint:
    """What everybody on the bus may know of an endpoint: where a ticket's begins."""
    if endpoint.kind != KIND:
        return endpoint
    return msgspec.structs.replace(endpoint, address=endpoint.address.partition("/")[0])
