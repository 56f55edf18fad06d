"""The roles a process can have; what each may do is `diptych_bus.permissions`."""

from enum import StrEnum


class Role(StrEnum):
    """What a process is. Of services it is the service's name, with which incarnations begin."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL_WORKER = "prefill-worker"
    DECODE_WORKER = "decode-worker"
    POWER_GOVERNOR = "power-governor"
    SUPERVISOR = "supervisor"
    """Starts the others, and creates streams and buckets."""
    OPERATOR = "operator"
    """A person at the command line."""
    OBSERVER = "observer"
    """Hears everything and changes nothing."""
