"""Loads llama.cpp's shared library, once per process, and checks that it is the expected build."""

import importlib.util
import os
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from diptych_contracts.errors import Incompatible, Permanent
from diptych_engine.llamacpp.declarations import (
    BUILD,
    DECLARATIONS,
    KNOWN_CONTEXT_DEFAULTS,
    KNOWN_MODEL_DEFAULTS,
    LOG_ERROR,
    LOG_WARN,
)

_KEPT_LINES = 8


class Library:
    """The loaded library: `ffi`, `lib`, and the last warnings it logged."""

    def __init__(self, path: Path) -> None:
        # Two workers with spinning OpenMP threads starve each other on a small machine; libgomp
        # reads this when it is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(DECLARATIONS)
        try:
            self.lib: Any = self.ffi.dlopen(str(path))
        except OSError as err:
            raise Permanent(f"cannot load llama.cpp from {path}: {err}") from err
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # Must live as long as the library may log: `load_library` keeps this object for good.
        self._log = self.ffi.callback("void(int32_t, const char *, void *)", self._keep)
        try:
            self._check_defaults(path)
            self.lib.llama_log_set(self._log, self.ffi.NULL)
            self.lib.llama_backend_init()
        except AttributeError as err:
            raise Incompatible(f"{path} is not llama.cpp {BUILD}: {err}") from err

    def _keep(self, level: int, text: Any, _data: Any) -> None:
        if level in (LOG_WARN, LOG_ERROR):
            line = self.ffi.string(text).decode("utf-8", "replace").strip()
            if line:
                self._lines.append(line)

    def _check_defaults(self, path: Path) -> None:
        for params, known in (
            (self.lib.llama_context_default_params(), KNOWN_CONTEXT_DEFAULTS),
            (self.lib.llama_model_default_params(), KNOWN_MODEL_DEFAULTS),
        ):
            for name, expected in known.items():
                seen = getattr(params, name)
                if seen != expected:
                    raise Incompatible(
                        f"{path} is not llama.cpp {BUILD}: "
                        f"expected default {name}={expected:g}, seen {seen:g}"
                    )

    def last_error(self) -> str:
        """The last lines the library complained with, as one; empties them."""
        text = "; ".join(self._lines)
        self._lines.clear()
        return text or "no reason given"


def installed_library() -> Path:
    """The shared library inside the installed `xllamacpp` package.

    Raises:
        Permanent: if the package is not installed, or holds no such library.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise Permanent("xllamacpp is not installed; install the extra: pip install '.[llamacpp]'")
    folder = Path(spec.origin).parent
    for name in ("xllamacpp.abi3.so", "xllamacpp.pyd"):
        if (folder / name).is_file():
            return folder / name
    raise Permanent(f"expected xllamacpp.abi3.so in {folder}, found none")


@cache
def load_library(path: Path) -> Library:
    """The library at `path`, loaded and checked.

    Raises:
        Permanent: if it cannot be loaded.
        Incompatible: if it is not the build the declarations describe.
    """
    return Library(path)
