"""Where KV may wait at a decode worker, as its settings say."""

from collections.abc import Callable

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_kvlink.parking import HostStore, Lot, Store
from diptych_kvlink.parking_file import DiskStore
from diptych_policy.paths import DISK, HOST
from diptych_worker.settings import WorkerSettings


def open_lots(
    settings: WorkerSettings, role: Role, layout: KvLayout, *, clock: Callable[[], float]
) -> dict[str, Lot]:
    """Where KV may wait for a seat. Raises `Permanent`."""
    lots: dict[str, Lot] = {}
    if role is not Role.DECODE or not layout.slot_bytes:
        return lots
    stores: list[tuple[str, int, Callable[[], Store]]] = [
        (HOST, settings.kv_parking_host_bytes, HostStore),
        (
            DISK,
            settings.kv_parking_disk_bytes,
            lambda: DiskStore(settings.kv_parking_dir, layout.slot_bytes),
        ),
    ]
    for kind, total_bytes, store in stores:
        if 0 < total_bytes < layout.slot_bytes:
            raise Permanent(
                f"KV_PARKING_{kind.upper()}_BYTES: {total_bytes} bytes hold no block: "
                f"one has {layout.slot_bytes}"
            )
        if total_bytes:
            lots[kind] = Lot(
                kind, store(), total_bytes=total_bytes, slot_bytes=layout.slot_bytes, clock=clock
            )
    return lots
