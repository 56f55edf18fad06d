from pathlib import Path

import pytest

from diptych_testkit.tiny_gguf import CONTEXT_TOKENS, write_tiny_gguf
from diptych_worker.assembling import read_card
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
