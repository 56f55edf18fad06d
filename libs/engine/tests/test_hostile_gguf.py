"""Files whose header can be read and whose weights cannot be used: llama.cpp has the last word.

It may even end its process: a worker is one of its own, and whoever started it goes on.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diptych_testkit.tiny_gguf import write_tiny_gguf

LOAD = """
import sys
from pathlib import Path
from diptych_contracts.errors import DiptychError
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp import LlamaCppEngine, LlamaCppSettings
path = Path(sys.argv[1])
try:
    card = card_from_gguf(path, model="tiny")
    LlamaCppEngine(path, card, LlamaCppSettings(kv_tokens=256, max_sequences=1, context_tokens=256))
except DiptychError as err:
    sys.exit(f"refused: {err}")
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count_kv": 77},
        {"llama.embedding_length": 2**31},
        {"llama.block_count": 10_000},
        {"llama.block_count": None},
        {"llama.rope.dimension_count": 3},
        {"general.alignment": 7},
    ],
    ids=lambda changes: "-".join(map(str, *changes.items())),
)
def test_weights_llama_cpp_cannot_use_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_tiny_gguf(tmp_path / "hostile.gguf")
    _change(path, changes)
    child = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 1, child.stderr
    assert child.stderr.splitlines()[-1].startswith(f"refused: {path}"), child.stderr


def _change(path: Path, changes: dict[str, Any]) -> None:
    """Numbers of the header, in place; None makes a key another one."""
    data = bytearray(path.read_bytes())
    for key, value in changes.items():
        name = key.encode()
        at = data.find(name)
        if at < 0:  # not there: instead of one nobody asks for
            data = data.replace(b"general.file_type", name.ljust(17, b"x"), 1)
            at = data.find(name)
        if value is None:
            data[at + len(name) - 1] ^= 1
        else:
            data[at + len(name) + 4 : at + len(name) + 8] = value.to_bytes(4, "little")
    path.write_bytes(data)
