from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_kvlink.parking import Lot
from diptych_testkit.tiny_gguf import CONTEXT_TOKENS, write_tiny_gguf
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_worker.assembling import read_card
from diptych_worker.lots import open_lots
from diptych_worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("context_tokens", "kv_tokens", "expected"),
    [(0, 16_384, 8192), (262_144, 300_000, 262_144), (262_144, 100_000, 100_000)],
)
def test_the_simulated_engine_takes_any_context_that_its_cells_hold(
    context_tokens: int, kv_tokens: int, expected: int
) -> None:
    settings = WorkerSettings(engine="sim", context_tokens=context_tokens, kv_tokens=kv_tokens)
    assert read_card(settings).context_tokens == expected


@pytest.mark.parametrize(("engine", "expected"), [("llamacpp", CONTEXT_TOKENS), ("sim", 10_000)])
def test_a_model_takes_what_it_was_trained_for(engine: str, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    settings = WorkerSettings(engine=engine, model_path=path, context_tokens=10_000)
    assert read_card(settings).context_tokens == expected


def test_an_engine_is_one_of_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"engine: expected one of llamacpp, sim.* got 'lamacpp'"):
        WorkerSettings(engine="lamacpp")


@pytest.mark.parametrize("n_bytes", [-1, 1 << 60])
@pytest.mark.parametrize("name", ["kv_parking_host_bytes", "kv_parking_disk_bytes"])
def test_room_to_park_is_no_more_than_there_can_be(name: str, n_bytes: int, tmp_path: Path) -> None:
    """A list of a large lot's slots took all memory; what is beyond 2^63 cannot be told."""
    settings: dict[str, Any] = {name: n_bytes, "kv_parking_dir": tmp_path}
    with pytest.raises(ValueError, match=f"{name}: expected 0 to"):
        WorkerSettings(**settings)


def test_room_for_less_than_a_block_stops_the_start() -> None:
    layout = ToyStepEngine().spec.layout

    def lots(n_bytes: int) -> Mapping[str, Lot]:
        settings = WorkerSettings(kv_parking_host_bytes=n_bytes)
        return open_lots(settings, Role.DECODE, layout, clock=lambda: 0.0)

    assert list(lots(layout.slot_bytes)) == ["host"]
    assert lots(1 << 50)["host"].room.total_bytes > (1 << 49)
    with pytest.raises(Permanent, match="KV_PARKING_HOST_BYTES: 4 bytes hold no block"):
        lots(4)
