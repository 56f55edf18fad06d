import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from diptych_bus.jetstream import JetStreamBus, declaring, store_identity
from diptych_bus.jetstream.answers import ApiError, api
from diptych_bus.server import NatsServer, command, config_text, jetstream_answers, read_port
from diptych_contracts.errors import BusAway, Permanent, Transient
from diptych_testkit.ports import free_port


async def test_a_server_starts_on_a_free_port_and_keeps_it(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, port=free_port()) as server:
        port = server.port
        assert server.url == f"nats://127.0.0.1:{port}"
        assert read_port(tmp_path, server.pid) == port
        assert jetstream_answers(port)

        await server.kill()
        assert not jetstream_answers(port)
        await server.start()
        assert server.port == port
    with pytest.raises(Transient):
        _ = server.pid


async def test_a_frozen_server_can_be_stopped(tmp_path: Path) -> None:
    server = await NatsServer(tmp_path, port=free_port()).start()
    server.freeze()
    while jetstream_answers(server.port, timeout_s=0.1):  # a stop signal takes its moment
        pass

    await server.stop()

    assert not jetstream_answers(server.port)


async def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(Permanent, match=f"port {port} on 127.0.0.1 is in use"):
            await NatsServer(tmp_path, port=port).start()


async def test_a_durable_server_has_everything_on_the_disk_first(tmp_path: Path) -> None:
    assert "sync_interval" not in config_text(tmp_path)
    assert 'sync_interval: "always"' in config_text(tmp_path, durable=True)
    async with NatsServer(tmp_path, durable=True) as server:
        bus = await JetStreamBus.connect(server.url, name="test", wait_s=60.0)
        await bus.close()
        assert jetstream_answers(server.port)


async def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("not a directory")

    with pytest.raises(Permanent, match="nats-server ended with 1: Can't start JetStream"):
        await NatsServer(tmp_path).start()


def test_a_supervisor_can_run_it_itself(tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"

    argv = command(config)

    assert Path(argv[0]).name == "nats-server"
    assert argv[1:] == ["--config", str(config)]
    assert "port: 4222" in config_text(tmp_path, port=4222)
    assert "max_payload: 4194304" in config_text(tmp_path)


async def test_connecting_to_nobody_is_one_clear_line() -> None:
    port = free_port()

    with pytest.raises(BusAway, match=f"expected NATS at nats://127.0.0.1:{port} within 0.3 s"):
        await JetStreamBus.connect(f"nats://127.0.0.1:{port}", name="t", wait_s=0.3)


async def test_a_bus_waits_for_a_server_that_starts_later(tmp_path: Path) -> None:
    server = await NatsServer(tmp_path, port=free_port()).start()
    await server.stop()

    connecting = asyncio.ensure_future(JetStreamBus.connect(server.url, name="t", wait_s=60.0))
    await asyncio.sleep(0.2)
    await server.start()

    bus = await connecting
    assert bus.connected
    await bus.close()
    await server.stop()


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(500, 10049, "error creating store for stream"),  # a deleted one's files still go
        ApiError(400, 10005, "no suitable peers for placement, peer offline"),  # one just died
    ],
)
async def test_a_stream_that_cannot_be_made_at_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: ApiError
) -> None:
    failures: list[str] = []

    async def failing(connection: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if path == "STREAM.CREATE.TOKENS" and len(failures) < 2:
            failures.append(path)
            raise refusal
        return await api(connection, path, *arguments, **options)

    monkeypatch.setattr(declaring, "api", failing)
    async with NatsServer(tmp_path) as server:
        bus = await JetStreamBus.connect(server.url, name="patient", wait_s=60.0)
        assert (await bus.span()).last_seq == 0
        await bus.close()
    assert len(failures) == 2


async def test_a_server_that_is_slow_has_as_long_as_its_clients_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine at full load five seconds were too short: a process that waits for 60 failed."""
    asked: dict[str, float] = {}

    async def noted(connection: Any, path: str, *arguments: Any, timeout_s: float) -> Any:
        asked[path] = timeout_s
        return await api(connection, path, *arguments, timeout_s=timeout_s)

    for module in (declaring, store_identity):
        monkeypatch.setattr(module, "api", noted)
    monkeypatch.setattr(declaring, "DECLARE_S", 0.0)
    monkeypatch.setattr(store_identity, "LOOK_S", 0.0)
    async with NatsServer(tmp_path) as server:
        bus = await JetStreamBus.connect(server.url, name="patient", wait_s=600.0)
        await bus.close()
    assert {"STREAM.CREATE.TOKENS", "STREAM.LIST"} <= asked.keys()
    assert min(asked.values()) > 60.0
