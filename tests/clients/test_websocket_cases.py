"""RFC 6455 by Autobahn's 517 cases (`kosoku`), on the gateway's own server around an echo."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from diptych_gateway.listening.server import ConnectionLimits, HttpServer
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

EXPECTED = {
    # A close within a message is a protocol error (1002) to `websockets`; the case wants 1000.
    "7.1.5": "FAILED",
    # Four megabytes in more than `MAX_FRAGMENTS` fragments: closed with 1009, on purpose.
    **dict.fromkeys(["9.3.1", "9.3.2", "9.3.3", "9.4.1", "9.4.2", "9.4.3"], "FAILED"),
}
COMPRESSED = ("12.", "13.")
"""permessage-deflate is not offered: a frame holds a token, of which there is nothing to gain."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        said = {name: message[name] for name in ("text", "bytes") if message.get(name) is not None}
        await send({"type": "websocket.send", **said})


@pytest.mark.timeout(900)
async def test_the_server_passes_all_cases_but_those_it_refuses(
    outside: OutsideClients, tmp_path: Path
) -> None:
    limits = ConnectionLimits(max_connections=64, max_frame_bytes=32 * 1024 * 1024, ping_s=20.0)
    server = HttpServer(echo, host="127.0.0.1", port=0, limits=limits)
    server.bind()
    serving = asyncio.create_task(server.run())
    try:
        url = f"ws://127.0.0.1:{server.port}"
        printed = await asyncio.to_thread(
            outside.run_python, "socket_cases.py", tmp_path, DIPTYCH_URL=url
        )
    finally:
        server.stop()
        await serving
    verdicts: dict[str, str] = json.loads(printed)
    assert len(verdicts) == 517
    compressed = {case for case in verdicts if case.startswith(COMPRESSED)}
    assert {verdicts[case] for case in compressed} == {"UNIMPLEMENTED"}
    failed = {case: verdict for case, verdict in verdicts.items() if verdict != "OK"}
    assert {case: failed[case] for case in failed.keys() - compressed} == EXPECTED
