"""A stack for the network without a key is refused before anything is fetched or loaded."""

from pathlib import Path

import pytest

from diptych_bus.jetstream import JetStreamBus
from diptych_bus.server import NatsServer
from diptych_cli import commands, door
from diptych_cli.failing import CliError
from diptych_cli.identities import keys_bucket
from diptych_contracts.keys import ApiKey, key_entry
from diptych_testkit.ports import free_port

ALLOW = "DIPTYCH_GATEWAY__ALLOW_ANONYMOUS"


def test_a_new_stack_for_the_network_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, port = tmp_path / "stack", str(free_port())
    missing = str(tmp_path / "none.gguf")
    told = ["up", "--host", "0.0.0.0", "--port", port, "--dir", str(store), "--model", missing]
    assert commands.main(told) == 1
    assert "refusing to listen on 0.0.0.0 without an API key" in capsys.readouterr().err
    assert not store.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_alone_needs_no_key(tmp_path: Path, host: str) -> None:
    door.check_new(host, tmp_path)


def test_whoever_may_serve_anybody_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CliError, match="without an API key"):
        door.check_new("0.0.0.0", tmp_path)
    monkeypatch.setenv(ALLOW, "true")
    door.check_new("0.0.0.0", tmp_path)


async def test_a_stack_that_has_a_key_opens(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats", port=free_port()) as server:
        refused = await door.refusal(server.url, "0.0.0.0")
        assert refused is not None
        assert "diptych keys create" in refused
        bus = await JetStreamBus.connect(server.url, name="test", wait_s=5.0)
        key = ApiKey(key_id="a1", sha256="00", shown="dk", tenant="t", name="n", created_unix_ms=1)
        await keys_bucket(bus).create(key_entry("a1"), key)
        await bus.close()
        assert await door.refusal(server.url, "0.0.0.0") is None


async def test_a_bus_that_is_away_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych_cli.joining._WAIT_S", 0.1)
    assert await door.refusal(f"nats://127.0.0.1:{free_port()}", "0.0.0.0") is None
