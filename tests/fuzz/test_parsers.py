"""Every parser that faces the outside, on cases that are the same in every run: a second each.

Those of the doors get twenty: bodies, frames of a socket, messages, KV frames and model files.

For longer: `make fuzz SECONDS=600 SEED=7`.
"""

import pytest

from diptych_testkit.fuzzing.parsers import PARSERS
from diptych_testkit.fuzzing.running import run_cases

SEED = 1
DOORS = ("chat", "websocket", "messages", "kv-frames", "gguf")


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # what libraries say of what they are given
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_answers_or_says_what_is_wrong(name: str) -> None:
    parser = PARSERS[name]
    run_cases(parser, SEED, parser.cases * (20 if name in DOORS else 1))
