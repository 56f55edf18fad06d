"""Tests run on a loop whose clock jumps: a moment's sleep is enough for all that is under way."""

from typing import Any

from diptych_testkit.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    return {"virtual": VirtualLoop}
