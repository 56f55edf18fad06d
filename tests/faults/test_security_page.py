"""`docs/security.md` says what is so: its roles are the code's, its tests are there."""

import re
from pathlib import Path

import pytest

from diptych_contracts.keys import Role
from diptych_policy.access import Right, may

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
NAMED = re.findall(r"`((?:libs|services|tests)/[\w/.-]+\.py)::(\w+)`", PAGE)
COLUMNS = (Right.LIST, Right.ASK, Right.LOOK, Right.ACCOUNT, Right.OPERATE, Right.ADMINISTER)


def test_the_page_names_tests() -> None:
    assert len(NAMED) >= 25


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, test: str) -> None:
    source = (ROOT / file).read_text()
    assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


@pytest.mark.parametrize("role", [None, *Role])
def test_the_roles_of_the_page_are_those_of_the_code(role: Role | None) -> None:
    name = "no key" if role is None else f"`{role}`"
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE, re.MULTILINE)
    shown = [cell.strip() == "yes" for cell in row.split("|")]
    assert shown == [may(role, right) for right in COLUMNS]
    assert set(COLUMNS) == set(Right)
