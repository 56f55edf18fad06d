import pytest

from diptych_bus.sizes import check_size, message_bytes
from diptych_contracts.errors import Permanent
from diptych_contracts.streams import MAX_MESSAGE_BYTES


def test_headers_count_as_the_server_counts_them() -> None:
    assert message_bytes(b"abc", None) == 3
    assert message_bytes(b"abc", {"A": "b"}) == 3 + len(b"NATS/1.0\r\nA: b\r\n\r\n")


def test_the_limit_includes_headers() -> None:
    exact = bytes(MAX_MESSAGE_BYTES)
    check_size("a", exact)

    with pytest.raises(Permanent, match="message on a has"):
        check_size("a", exact, {"A": "b"})
