"""The reading process of `bench/kvlink.py`: a decode worker's slots, open to one writer."""

import json
import os
import sys
import time
from pathlib import Path

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import encode
from diptych_kvlink.links import LinkSettings, open_targets
from diptych_kvlink.pool_file import PoolShape
from diptych_kvlink.sealing import TicketOffice
from diptych_kvlink.tallying import Tally
from diptych_kvlink.tcp_receiving import Guard
from diptych_kvlink.verifying import checksum
from diptych_testkit.builders import a_generation
from linking.figures import own_cpu_s
from linking.plain import listener, shared_memory

WRITER = Incarnation("prefill-worker-1")
STALL_S, SALT = 30.0, 7
WITH_TLS = "tcp TLS"
NAMES = ("shm", "nixl", "tcp", WITH_TLS)


def read(asked: dict) -> None:
    """As the reader, until the writer's pipe ends."""
    count = asked["count"]
    shape = PoolShape(slots=count * asked["windows"], slot_bytes=asked["size"])
    guard = Guard(TicketOffice(time.monotonic), Tally())
    links, views = {}, []
    for tls in (True, False):
        kinds = tuple(asked["kinds"]) if tls else ("tcp",)
        settings = LinkSettings(
            kinds=kinds, directory=Path(asked["folder"]), stall_s=STALL_S, tls=tls
        )
        targets = open_targets(settings, name=f"decode-{tls:d}", shape=shape, guard=guard)
        seal = granted(targets, guard, asked, shape.slots)
        for target in targets:
            name = WITH_TLS if target.endpoint.certificate else target.endpoint.kind
            links[name] = (encode(target.endpoint).hex(), seal.hex())
        views = views or [targets[0].view(slot, shape.slot_bytes) for slot in range(shape.slots)]
    plain_file, outside = shared_memory(asked["folder"], shape)
    port, received = listener(shape, count)
    ordered = {name: links[name] for name in NAMES if name in links}
    print(json.dumps({"links": ordered, "plain": plain_file, "port": port}), flush=True)
    memories = {"links": views, "plain": outside, "socket": received}
    for line in sys.stdin:
        order, *of = line.split()
        if order == "verify":
            which, start = of[0], int(of[1]) * count
            print(verified_s(memories[which][start : start + count]), flush=True)
        else:
            print(own_cpu_s(), flush=True)
    os._exit(0)


def verified_s(blocks: list[memoryview]) -> float:
    """How long it takes to hash every block."""
    began_s = time.perf_counter()
    for block in blocks:
        checksum(block, SALT)
    return time.perf_counter() - began_s


def granted(targets, guard: Guard, asked: dict, slots: int) -> bytes:
    """Every slot open to the writer, under one ticket."""
    generation = a_generation("r1")
    certificate, agent = bytes.fromhex(asked["certificate"]), bytes.fromhex(asked["agent"])
    for target in targets:
        target.expect(WRITER, certificate, agent)
        for slot in range(slots):
            target.admit(slot, 1, WRITER, f"{generation.request_id}.{generation.attempt}")
    end_s = time.monotonic() + 3600
    return encode(guard.office.seal(generation, WRITER, slots=b"", deadline_s=end_s))
