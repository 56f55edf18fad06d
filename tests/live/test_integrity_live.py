"""A byte of KV is flipped in the real pool between write and claim: refused, computed again."""

import asyncio
import json
import mmap
import os
import struct
import time
import urllib.request
from typing import Any

import openai
import pytest

from diptych_kvlink.lockfile import PREFIX, SHM_DIRECTORY
from diptych_kvlink.pool_file import PoolShape
from diptych_testkit.live_stack import MODEL, LiveStack, Process

pytestmark = pytest.mark.live

LONG = "Once upon a time there was a lighthouse keeper who counted every ship. " * 60
TRIES = 6
"""Who does not come to run for a while flips a byte of what was claimed already."""
LATER = 4
"""A chunk of 256 tokens, of the four that the prompt takes, in blocks of 64."""
_SHAPE = struct.Struct("<8sQQ")


class Pool:
    """A decode worker's shared memory, opened by a stranger. Both links write into it."""

    def __init__(self, worker: Process) -> None:
        path = SHM_DIRECTORY / f"{PREFIX}kv-{worker.incarnation}"
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        _, slots, slot_bytes = _SHAPE.unpack_from(self._map)
        self._shape = PoolShape(slots, slot_bytes)

    def flip_a_written_byte(self) -> int:
        """Alter a slot that is complete, while the prompt is still computed.

        The first one that was written has its checksum by the time that `LATER` more are.
        """
        give_up_s = time.monotonic() + 60
        first: int | None = None
        while time.monotonic() < give_up_s:
            written = [slot for slot in range(self._shape.slots) if self._holds(slot)]
            if written and first is None:
                first = written[0]
            if first is not None and len(written) > LATER:
                self._map[self._at(first) + 5000] ^= 1
                return first
            time.sleep(0.002)
        raise AssertionError("no block was written")

    def _at(self, slot: int) -> int:
        return self._shape.slots_at + slot * self._shape.stride_bytes

    def _holds(self, slot: int) -> bool:
        at = self._at(slot)
        return any(self._map[at + 4096 : at + 4160])

    def wipe(self) -> None:
        """Forget what earlier requests left."""
        for slot in range(self._shape.slots):
            at = self._at(slot)
            self._map[at + 4096 : at + 4160] = bytes(64)

    def close(self) -> None:
        self._map.close()


def refused(worker: Process, reason: str) -> float:
    """How often the worker has refused KV for `reason`."""
    url = f"http://127.0.0.1:{worker.health_port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = f'diptych_kv_refused_total{{reason="{reason}"}} '
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


async def ask(client: openai.AsyncOpenAI, link: str) -> tuple[str, dict[str, Any]]:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LONG + f"What did he see? ({link})"}],
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True, "diptych": {"mode": "remote", "link": link}},
    )
    path = json.loads(answer.model_dump_json())["usage"]["diptych"]
    return answer.choices[0].message.content or "", path


@pytest.mark.parametrize("link", ["shm", "tcp"])
async def test_a_byte_flipped_between_write_and_claim_costs_an_attempt_and_no_word(
    own_stack: LiveStack, link: str
) -> None:
    await asyncio.to_thread(own_stack.start_all, {"PREFIX_CACHE": "false"})
    decode = own_stack.of("decode-worker")
    pool = Pool(decode)
    async with openai.AsyncOpenAI(
        base_url=own_stack.base_url, api_key="none", max_retries=0, timeout=240
    ) as client:
        undisturbed, path = await ask(client, link)
        assert (path["attempt"], path["link"]) == (1, link)
        for _ in range(TRIES):
            pool.wipe()
            flipping = asyncio.create_task(asyncio.to_thread(pool.flip_a_written_byte))
            text, path = await ask(client, link)
            await flipping
            assert text == undisturbed
            if path["attempt"] != 1:
                break
    pool.close()
    assert (path["attempt"], path["link"]) == (2, link)
    assert refused(decode, "checksum") == 1
