"""Reads JSON that an engine, or the other side of a hand-off, wrote."""

from typing import Any

import msgspec


def from_json(data: bytes | str, kind: Any = Any) -> Any:
    """`data` as `kind`.

    Raises:
        msgspec.DecodeError: it is of another form. Nested too deeply is one: what `msgspec` raises
            there would pass for a bug of ours and end the worker.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as err:
        raise msgspec.DecodeError("it is nested too deeply") from err
