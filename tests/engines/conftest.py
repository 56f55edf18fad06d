from collections.abc import Iterator

import pytest

from diptych_engine.over_http import client
from diptych_testkit.engine_entries import entries
from diptych_testkit.engine_pairs import Duo, EngineEntry

_PARAMS = [
    pytest.param(e, id=e.name, marks=[getattr(pytest.mark, e.marker)] if e.marker else [])
    for e in entries()
]


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """A crowd's connections to servers of this very process may take long on a busy machine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client, "CONNECT_S", 60.0)
        yield


@pytest.fixture(scope="session", params=_PARAMS)
def entry(request: pytest.FixtureRequest) -> EngineEntry:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def duo(entry: EngineEntry) -> Iterator[Duo]:
    with entry.open() as pair:
        yield Duo(pair)


@pytest.fixture
def fresh(entry: EngineEntry) -> Iterator[Duo]:
    """A pair of one's own, to be broken."""
    with entry.open() as pair:
        yield Duo(pair)
