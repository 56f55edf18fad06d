import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from diptych_chassis import health, probe


class Readiness:
    ok = False


@pytest.fixture
async def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def port(readiness: Readiness) -> AsyncIterator[int]:
    pages = {"/health/ready": lambda: health.verdict(readiness.ok, detail="loading")}
    server = health.HealthServer("127.0.0.1", 0, pages)
    await server.start()
    yield server.port
    await server.close()


async def probed(port: int) -> int:
    environ = {"DIPTYCH_SCHEDULER__HEALTH_PORT": str(port)}
    return await asyncio.to_thread(probe.main, ["scheduler"], environ)


async def test_a_service_that_serves_is_healthy(
    port: int, readiness: Readiness, capsys: pytest.CaptureFixture[str]
) -> None:
    readiness.ok = True
    assert await probed(port) == 0
    assert capsys.readouterr().out == '{"ok": true, "detail": "loading"}\n'


async def test_one_that_does_not_says_why(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert await probed(port) == 1
    assert "loading" in capsys.readouterr().out


def test_nobody_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert probe.main(["scheduler"], {"DIPTYCH_ALL__HEALTH_PORT": str(port)}) == 1
    assert capsys.readouterr().err.startswith(f"no answer on port {port}: ")


async def test_something_else_on_the_port_is_not_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 hello\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        assert await probed(server.sockets[0].getsockname()[1]) == 1
    assert "expected HTTP, got b'220 hello" in capsys.readouterr().err


def test_the_services_own_port_comes_before_everybodys() -> None:
    both = {"DIPTYCH_ALL__HEALTH_PORT": "8081", "DIPTYCH_DECODE_WORKER__HEALTH_PORT": "9000"}
    assert probe.health_port("decode-worker", both) == 9000
    assert probe.health_port("gateway", both) == 8081


@pytest.mark.parametrize("told", ["", "0", "http"])
def test_without_a_port_there_is_nothing_to_ask(
    told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe.main(["gateway"], {"DIPTYCH_ALL__HEALTH_PORT": told}) == 2
    assert "HEALTH_PORT of gateway is not set" in capsys.readouterr().err


def test_a_wrong_call_says_how() -> None:
    command = [sys.executable, "-m", "diptych_chassis.probe"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        b"usage: python -m diptych_chassis.probe SERVICE\n",
    )
