from pathlib import Path

import pytest

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_worker.lots import open_lots
from diptych_worker.settings import WorkerSettings

LAYOUT = KvLayout(
    layout_id="toy", engine_build="1", block_tokens=64, slot_bytes=1_000_000, dtype="f16"
)


def opened(role: Role = Role.DECODE, **settings: int | Path) -> list[str]:
    chosen = WorkerSettings(engine="sim", **settings)  # type: ignore[arg-type]
    lots = open_lots(chosen, role, LAYOUT, clock=float)
    kinds = list(lots)
    for lot in lots.values():
        lot.close()
    return kinds


def test_there_is_a_lot_where_there_is_room(tmp_path: Path) -> None:
    on_disk: dict[str, int | Path] = {
        "kv_parking_disk_bytes": 1_000_000,
        "kv_parking_dir": tmp_path,
    }
    assert opened() == []
    assert opened(kv_parking_host_bytes=1_000_000) == ["host"]
    assert opened(kv_parking_host_bytes=2_000_000, **on_disk) == ["host", "disk"]
    assert opened(Role.PREFILL, kv_parking_host_bytes=2_000_000, **on_disk) == []


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_room_for_no_block_is_told_and_not_taken(kind: str, tmp_path: Path) -> None:
    """A worker would start, and park nothing."""
    room: dict[str, int | Path] = {f"kv_parking_{kind}_bytes": 999_999, "kv_parking_dir": tmp_path}
    told = rf"KV_PARKING_{kind.upper()}_BYTES: expected 0, .*1000000 bytes.* got 999999"
    with pytest.raises(Permanent, match=told):
        opened(**room)


@pytest.mark.parametrize("name", ["kv_parking_host_bytes", "kv_parking_disk_bytes"])
def test_less_than_nothing_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected 0 or more, got -1"):
        opened(**{name: -1})
