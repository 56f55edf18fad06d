"""Who this process is on the bus, from its settings. There is no other way in."""

from diptych_bus.access import Access
from diptych_chassis.settings import BadSettings, ServiceSettings, prefix


def access(service: str, settings: ServiceSettings) -> Access:
    """The identity of this process, which must be one of its role.

    Raises:
        Permanent: a setting is missing, or a file is not what it should be.
    """
    if not settings.nats_url.startswith("tls://"):
        raise BadSettings(f"nats_url: expected tls://HOST:PORT, got {settings.nats_url!r}")
    if settings.identity is None or settings.trust is None:
        missing = "IDENTITY" if settings.identity is None else "TRUST"
        raise BadSettings(
            f"{prefix(service)}{missing} must be set: the bus is joined with an identity "
            "(docs/security.md; `diptych up` makes one for each process)"
        )
    found = Access(settings.identity, settings.trust)
    if found.role.value != service:
        raise BadSettings(f"{settings.identity} is of a {found.role.value}, expected a {service}")
    return found
