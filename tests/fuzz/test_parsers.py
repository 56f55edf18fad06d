"""Every parser that faces the outside, on cases that are the same in every run: a second each.

For longer: `make fuzz SECONDS=600 SEED=7`.
"""

import pytest

from diptych_testkit.fuzzing.parsers import PARSERS
from diptych_testkit.fuzzing.running import run_cases

SEED = 1


@pytest.mark.filterwarnings("default")  # what libraries say of what they are given
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_answers_or_says_what_is_wrong(name: str) -> None:
    parser = PARSERS[name]
    run_cases(parser, SEED, parser.cases)
