import pytest

from diptych_bus.jetstream.connection import without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://user:p@ss@host:4222", "nats://host:4222"),
        ("tls://token@host", "tls://host"),
        ("host:4222", "host:4222"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
