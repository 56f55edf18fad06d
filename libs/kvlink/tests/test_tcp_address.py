import socket

import pytest

from diptych_contracts.errors import Incompatible, Permanent
from diptych_kvlink.tcp_address import TcpAddress, announced_host, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "decode-1.internal"])
def test_an_address_survives_the_bus(host: str) -> None:
    address = TcpAddress(host, 7000, "decode-worker-1", b"k" * 16)
    assert TcpAddress.parse(str(address)) == address


def test_what_may_be_logged_has_no_key() -> None:
    address = TcpAddress("::1", 7000, "decode-worker-1", b"\xab" * 16)
    assert address.where == "[::1]:7000"
    assert "ab" not in address.where


@pytest.mark.parametrize(
    "address",
    [
        *("", "host:1", "host:1/r", "host:x/r/00", "host:0/r/00", "host:1/r/zz", ":1/r/00"),
        *("h\0:1/r/00", "é:1/r/00", "a b:1/r/00", "host:1/r\n/00", "host:\u0661/r/00"),
        *("[[::1]:1/r/00", "[::1:1/r/00", "::1]:1/r/00", "[h:1/r/00"),
        *("h" * 64 + ":1/r/00", "host:1/" + "r" * 600 + "/00"),
    ],
)
def test_nonsense_is_incompatible_and_never_repeated(address: str) -> None:
    with pytest.raises(Incompatible, match=r"expected a KV address host:port/reader/key$"):
        TcpAddress.parse(address)


def test_loopback_reaches_one_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.7", "decode-1")))


def test_a_wildcard_announces_the_machines_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "decode-1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "10.0.0.7")
    assert announced_host("0.0.0.0") == announced_host("::") == "10.0.0.7"
    assert announced_host("127.0.0.1") == "127.0.0.1"
    assert announced_host("decode-1") == "decode-1"


def test_a_wildcard_that_leads_nowhere_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "decode-1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "127.0.1.1")
    with pytest.raises(Permanent, match=r"'decode-1' means 127\.0\.1\.1; name the address"):
        announced_host("0.0.0.0")
