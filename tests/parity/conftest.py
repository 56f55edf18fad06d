import pytest

from diptych_bus.jetstream import buckets, bus, declaring, direct, objects, pulling, watching

PATIENT_S = 60.0


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
