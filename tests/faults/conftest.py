"""Tests marked `virtual_time` run on a loop whose clock jumps: no wall time passes."""

import asyncio
from typing import Any

import pytest

from diptych_testkit.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Any]:
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual": VirtualLoop} if virtual else {"real": asyncio.new_event_loop}
