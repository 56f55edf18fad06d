"""A traceback that repeats nothing of what people wrote.

The message of an exception may hold whatever the code was looking at: `KeyError` says the key,
`ValueError` the value. Where it was raised is code and may be shown; what it says is shown of
exceptions whose messages are written here, or by the operating system.
"""

import traceback
from collections.abc import Iterator

from diptych_contracts.errors import DiptychError, InvalidRequest

_SPEAKING = (DiptychError, AssertionError, TimeoutError)
_REPEATING = (InvalidRequest,)
HIDDEN = "<message hidden: it may repeat what somebody wrote>"


def told(error: BaseException) -> str:
    """`error`, what caused it and what it is made of, with the places they were raised at."""
    return "\n".join(_lines(error, set()))


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _lines(before, seen)
        yield "from that came:"
    yield from (line.rstrip("\n") for line in traceback.format_tb(error.__traceback__))
    yield said(error)
    if isinstance(error, BaseExceptionGroup):
        for number, part in enumerate(error.exceptions, 1):
            if id(part) not in seen:
                yield f"part {number}:"
                yield from (f"  {line}" for line in _lines(part, seen))


def said(error: BaseException) -> str:
    """Type and, where it repeats nothing, message."""
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    if isinstance(error, OSError):
        return f"{name}: [Errno {error.errno}] {error.strerror}"
    if isinstance(error, _SPEAKING) and not isinstance(error, _REPEATING):
        return f"{name}: {error}"
    return f"{name}: {HIDDEN}" if str(error) else name
