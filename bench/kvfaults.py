"""How long it takes until a fault of a KV transfer is known on the other side.

    python bench/kvfaults.py [--rounds 5]

Two processes per round, real links at their default deadlines, real SIGKILL and SIGSTOP. What the
links themselves notice; a frozen peer that owes nothing is noticed by its missing beats (1 s of
silence, `policy.liveness`), which needs a bus and is not measured here.
"""

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from diptych_kvlink.nixl_library import why_absent
from diptych_testkit.kv_pair import Pair, PeerFailed

BLOCKS = 3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    links = ["shm", "tcp"] + ([] if why_absent() else ["nixl/tcp", "nixl/tcp,cma"])
    print(f"{'fault':44}" + "".join(f"{link:>16}" for link in links))
    for fault, (measure, none_for) in FAULTS.items():
        row = [
            "-" if link.partition("/")[0] in none_for else told(link, measure, rounds)
            for link in links
        ]
        print(f"{fault:44}" + "".join(f"{cell:>16}" for cell in row), flush=True)


def told(link: str, measure: Callable[[Pair], float], rounds: int) -> str:
    """Median and worst, in seconds."""
    took = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            pair = Pair(link, Path(folder))
            try:
                took.append(measure(pair))
            finally:
                pair.close()
    return f"{statistics.median(took):.2f} ({max(took):.2f})"


def reader_killed(pair: Pair, written: int) -> float:
    """Until the writer's hand-off has failed."""
    pair.open("r1")
    pair.write("r1", range(written), "A")
    pair.writer.ask("look")
    began_s = time.monotonic()
    pair.reader.process.kill()
    if written < BLOCKS:
        assert pair.writer.ask("fails", transfer="r1.1", within_s=60)
    else:
        assert pair.writer.ask("gone", transfer="r1.1", within_s=60)
    return time.monotonic() - began_s


def writer_killed(pair: Pair, written: int, *, mid_block: bool = False) -> float:
    """Until the reader's ledger says so."""
    pair.open("r1")
    pair.write("r1", range(written), "A")
    if mid_block:
        pair.writer.ask("begin", transfer="r1.1", index=written, sign="A")
    began_s = time.monotonic()
    pair.writer.process.kill()
    assert "died" in pair.until_stands("r1", "failed")
    return time.monotonic() - began_s


def reader_frozen(pair: Pair) -> float:
    """Until the writer's hand-off has failed, with blocks on their way."""
    pair.open("r1")
    pair.reader.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    pair.write("r1", range(BLOCKS), "A")
    try:
        pair.digests("r1")
    except PeerFailed:
        return time.monotonic() - began_s
    return float("nan")


def writer_frozen(pair: Pair) -> float:
    """Until the reader's ledger says so, of a block that stopped on its way."""
    pair.open("r1")
    pair.writer.ask("begin", transfer="r1.1", index=0, sign="A")
    began_s = time.monotonic()
    pair.writer.signal(signal.SIGSTOP)
    pair.until_stands("r1", "failed")
    return time.monotonic() - began_s


FAULTS: dict[str, tuple[Callable[[Pair], float], tuple[str, ...]]] = {
    "reader killed before the first block": (lambda pair: reader_killed(pair, 0), ()),
    "reader killed among the blocks": (lambda pair: reader_killed(pair, 1), ()),
    "reader killed before the hand-over": (lambda pair: reader_killed(pair, BLOCKS), ()),
    "writer killed before the first block": (lambda pair: writer_killed(pair, 0), ()),
    "writer killed in mid-block": (lambda pair: writer_killed(pair, 1, mid_block=True), ()),
    "writer killed before the hand-over": (lambda pair: writer_killed(pair, BLOCKS), ()),
    "reader frozen under blocks on their way": (reader_frozen, ("shm",)),
    "writer frozen in mid-block": (writer_frozen, ("shm", "nixl")),
}


if __name__ == "__main__":
    main()
