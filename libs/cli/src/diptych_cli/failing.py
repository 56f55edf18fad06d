"""Errors of the command line: one clear line that says what to do."""

import importlib
from types import ModuleType


class CliError(Exception):
    """Ends the command; its text is all the user sees."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def need(module: str, *, extra: str = "embedded") -> ModuleType:
    """Import `module`, or name the extra that brings it.

    Raises:
        CliError: a package that `module` needs is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise CliError(f"{err.name} is not installed; try: pip install 'diptych[{extra}]'") from err
