"""Which of the blocks that wait go out together."""

from collections import deque

BATCH_BLOCKS = 256
BATCH_BYTES = 1 << 24
"""So that a batch is soon over, and a hung peer soon noticed."""


def take_batch(waiting: deque[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    """Take the first of `waiting`: index and bytes of each. A block too big for a batch is one."""
    batch: list[tuple[int, memoryview]] = []
    n_bytes = 0
    while waiting and len(batch) < BATCH_BLOCKS:
        n_bytes += len(waiting[0][1])
        if batch and n_bytes > BATCH_BYTES:
            break
        batch.append(waiting.popleft())
    return batch
