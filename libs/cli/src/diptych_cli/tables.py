"""Tables in the terminal."""

from typing import Any

from diptych_cli.failing import need

_SCRIPT_COLUMNS = 200
"""Where no terminal has a width, nothing is cut."""


def console() -> Any:
    """Standard output, wide enough for scripts."""
    rich: Any = need("rich.console")
    # Names from outside are no markup.
    plain = {"highlight": False, "markup": False, "emoji": False}
    made = rich.Console(**plain)
    return made if made.is_terminal else rich.Console(width=_SCRIPT_COLUMNS, **plain)


def blank(*columns: str, right: tuple[str, ...] = (), fold: tuple[str, ...] = ()) -> Any:
    """A table without rows; the columns in `right` hold numbers, those in `fold` may take lines."""
    made: Any = need("rich.table").Table(box=need("rich.box").SIMPLE)
    for column in columns:
        side = "right" if column in right else "left"
        overflow = {"overflow": "fold"} if column in fold else {"no_wrap": True}
        made.add_column(column, justify=side, **overflow)
    return made


def printable(text: str) -> str:
    """What another process says, fit for a terminal: no sign of it moves, hides or colours any."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
