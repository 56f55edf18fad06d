from typing import Any

import pytest

from diptych_cli.commands import _ENGINES
from diptych_cli.engine_doctor import engine_doctor
from diptych_engine import examining
from diptych_engine.examining import Examined, examine
from diptych_engine.tensorrt_llm import examining as trtllm_examining
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.fake_engines.vllm import FakeVllm, VllmHabits
from diptych_testkit.fake_trtllm_serve import FakeServe


def test_every_engine_can_be_looked_at() -> None:
    assert set(examining.known()) == set(_ENGINES)


async def test_an_engine_that_is_not_here() -> None:
    def importer(name: str, /) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    (found,) = [f async for f in trtllm_examining.examine(Examined("tensorrt_llm"), importer)]
    assert (found.about, found.grade) == ("package", "missing")
    assert "libcuda.so.1" in found.found
    assert "its own image or venv" in found.advice


async def test_an_engine_that_fits() -> None:
    importer = fake.at("1.3.0").importer
    found = [f async for f in trtllm_examining.examine(Examined("tensorrt_llm"), importer)]
    assert {finding.grade for finding in found} == {"fine"}
    assert "TensorRT-LLM 1.3.0" in [finding.found for finding in found]
    assert "health check of its own: yes" in [finding.found for finding in found]


async def test_every_difference_is_named() -> None:
    installed = fake.at("1.3.0")
    del installed.names["RequestError"], installed.names["Logprob"]
    found = [f async for f in trtllm_examining.examine(Examined("x"), installed.importer)]
    assert [f.found.split(":")[0] for f in found if f.grade == "missing"] == [
        "Logprob",
        "RequestError",
    ]


@pytest.mark.parametrize(("version", "grade"), [("1.2.1", "fine"), ("1.4.0", "missing")])
async def test_a_server_tells_its_version(version: str, grade: str) -> None:
    server = FakeServe(fake.at("1.3.0"))
    server.installed.version = version
    async with server.running():
        found = [f async for f in examine(Examined("trtllm_serve", server.url))]
    assert [(f.about, f.grade) for f in found] == [
        ("healthy", "fine"),
        ("version", "fine"),
        ("contract", grade),
    ]


@pytest.mark.parametrize(
    ("version", "grade"), [("0.9.1", "missing"), ("0.32.0", "fine"), ("9.0.0", "note")]
)
async def test_a_version_is_judged_as_the_worker_will(version: str, grade: str) -> None:
    server = FakeVllm(habits=VllmHabits(version=version))
    server.start()
    try:
        found = [f async for f in examine(Examined("vllm", server.url))]
    finally:
        server.stop()
    assert [(f.about, f.grade) for f in found][-1] == ("contract", grade)


@pytest.mark.parametrize("url", ["localhost:8000", "http://[::1", "http://u:secret@h:1"])
async def test_a_url_that_is_none_is_said_in_one_line(url: str) -> None:
    (found,) = [f async for f in examine(Examined("vllm", url))]
    assert found.grade == "missing"
    assert found.found.startswith("--url: expected http://host:port")
    assert "secret" not in found.found


@pytest.mark.parametrize(("url", "says"), [("", "--url URL"), ("http://127.0.0.1:9", "start it")])
def test_a_server_that_is_not_there(
    url: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine_doctor("vllm", url) == 1
    assert says in capsys.readouterr().out
