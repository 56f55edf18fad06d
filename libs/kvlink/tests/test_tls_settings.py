"""Where KV may be listened for, and what a reservation must bring for it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import Permanent, Refused
from diptych_kvlink.links import LinkSettings, open_targets
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard

SHAPE = PoolShape(slots=4, slot_bytes=50_000)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "0x0"])
def test_without_tls_no_wildcard_is_listened_on(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "decode-1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "10.0.0.7")
    settings = LinkSettings(kinds=("tcp",), directory=tmp_path, host=host, tls=False)
    guard = Guard(TicketOffice(lambda: 0.0), Tally())
    with pytest.raises(Permanent, match="in the clear"):
        open_targets(settings, name="x", shape=SHAPE, guard=guard)


def test_with_tls_a_wildcard_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "decode-1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "10.0.0.7")
    settings = LinkSettings(kinds=("tcp",), directory=tmp_path, host="0.0.0.0")
    guard = Guard(TicketOffice(lambda: 0.0), Tally())
    (target,) = open_targets(settings, name="x", shape=SHAPE, guard=guard)
    assert target.endpoint.address.startswith("10.0.0.7:")
    assert target.endpoint.certificate
    target.close()


@pytest.mark.parametrize("kind", ["tcp"])
def test_a_reservation_without_a_certificate_takes_no_slot(reader: Any) -> None:
    with pytest.raises(Refused, match="with TLS only") as caught:
        reader.reserve(certificate=b"")
    assert caught.value.reason == "unsupported"
    assert reader.incoming.slots_used == 0
