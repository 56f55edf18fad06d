"""The bus on a NATS server with JetStream, through nats-py and patterns that heal."""

from diptych_bus.jetstream.bus import JetStreamBus

__all__ = ["JetStreamBus"]
