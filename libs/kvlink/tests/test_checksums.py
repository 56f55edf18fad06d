"""Checksums of many blocks: each its own, however they are shared out."""

import os

import pytest

from diptych_kvlink.verifying import checksum, checksums


@pytest.mark.parametrize("sizes", [[], [5], [300_000] * 7, [300_000, 1, 700_000], [1 << 18] * 2])
def test_each_block_has_the_checksum_it_has_alone(sizes: list[int]) -> None:
    blocks = [memoryview(os.urandom(size)) for size in sizes]
    assert checksums(blocks, 7) == [checksum(block, 7) for block in blocks]
