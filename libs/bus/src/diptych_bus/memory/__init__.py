"""The bus in memory: the semantics of JetStream without a server, proved by `tests/parity`."""

from diptych_bus.memory.broker import MemoryBroker
from diptych_bus.memory.bus import MemoryBus
from diptych_bus.memory.faults import Faults

__all__ = ["Faults", "MemoryBroker", "MemoryBus"]
