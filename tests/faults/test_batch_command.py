"""`diptych batch` against a real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diptych_cli import batch
from diptych_cli.asking import Server
from diptych_cli.failing import CliError
from diptych_contracts.fleet import Role
from diptych_testkit.builders import MODEL
from diptych_testkit.small_fleet import small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, SmallGateway, small_gateway
from diptych_testkit.toy_engine import ToyStepEngine

CHAT = "/v1/chat/completions"


def line(number: int, **changes: Any) -> str:
    said = [{"role": "user", "content": "Hello"}]
    body = {"model": MODEL, "messages": said, "max_tokens": 4, "temperature": 0} | changes
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body})


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SmallGateway]:
    monkeypatch.setattr(batch, "POLL_S", 0.05)
    async with small_fleet() as fleet:
        fleet.scheduler("s1")
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(vocab_size=VOCAB_SIZE))
        await fleet.ready()
        async with small_gateway(fleet, "g1") as gateway:
            yield gateway


async def run(gateway: SmallGateway, what: str, **options: Any) -> int:
    server = Server(f"{gateway.client.base_url}/v1".replace("//v1", "/v1"))
    wishes = batch.BatchOptions(**({"output": None, "errors": None} | options))
    return await asyncio.to_thread(batch.batch, server, what, wishes)


async def test_a_file_comes_back_answered(
    gateway: SmallGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output, errors = tmp_path / "in", tmp_path / "out", tmp_path / "err"
    path.write_text("\n".join([line(1), line(2, max_tokens=10**7), line(3)]))
    assert await run(gateway, str(path), output=output, errors=errors) == 1
    found = [json.loads(each)["custom_id"] for each in output.read_text().splitlines()]
    assert found == ["c1", "c3"]
    assert json.loads(errors.read_text())["custom_id"] == "c2"
    told = capsys.readouterr().err
    assert "completed: 2 of 3, 1 failed" in told
    batch_id = next(word for word in told.split() if word.startswith("batch_"))
    output.unlink()
    assert await run(gateway, batch_id, output=output) == 1
    assert len(output.read_text().splitlines()) == 2


async def test_faults_are_told_with_their_lines(
    gateway: SmallGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in"
    path.write_text("\n".join([line(1), line(2, temperature=-1)]))
    assert await run(gateway, str(path)) == 1
    assert "line 2: 'temperature'" in capsys.readouterr().err


async def test_what_is_no_file_of_requests_is_told_at_once(
    gateway: SmallGateway, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    with pytest.raises(CliError, match="No such file"):
        await run(gateway, str(path))
    path.write_text("{}")
    with pytest.raises(CliError, match="expected lines like"):
        await run(gateway, str(path))
