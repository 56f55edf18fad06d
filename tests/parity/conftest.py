import pytest

from diptych_bus.jetstream import (
    buckets,
    bus,
    connection,
    declaring,
    direct,
    objects,
    pulling,
    watching,
)

PATIENT_S = 60.0
SETTLED_S = 10.0
"""Until then a subscription is heard by the server, or nobody waits for it any more: shorter, since
what a lost connection took along is waited for in vain."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose disk is busy with other tests is not away."""
    for module, names in (
        (buckets, ("CALL_S",)),
        (bus, ("CALL_S", "FLUSH_S")),
        (declaring, ("DECLARE_S",)),
        (direct, ("CALL_S", "READ_S")),
        (objects, ("CALL_S",)),
        (pulling, ("DECLARE_S",)),
        (watching, ("LISTING_S",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, PATIENT_S)
    monkeypatch.setattr(connection, "SETTLE_S", SETTLED_S)
