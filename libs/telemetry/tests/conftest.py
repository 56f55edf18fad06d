"""Telemetry is the process's: each test leaves it as it was."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root_handlers = list(logging.getLogger().handlers)
    yield
    logging.captureWarnings(False)
    logging.getLogger().handlers = root_handlers
    structlog.reset_defaults()
