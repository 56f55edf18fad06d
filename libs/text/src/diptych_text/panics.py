"""Panics of libraries in Rust: Python sees a `BaseException`, which would end the process.

They are bugs of the library that an odd input sets off, and leave its objects as they were.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diptych_contracts.errors import DiptychError


@contextmanager
def panic_as(error: Callable[[str], DiptychError]) -> Iterator[None]:
    """Raise `error` of what a panic says, in its stead."""
    try:
        yield
    except BaseException as err:
        if type(err).__name__ != "PanicException":  # its class cannot be imported
            raise
        raise error(f"{err!s:.200}") from err
