import ctypes.util
from pathlib import Path

import pytest

from diptych_contracts.errors import Incompatible, Permanent
from diptych_engine.llamacpp import library as loading
from diptych_engine.llamacpp.declarations import KNOWN_CONTEXT_DEFAULTS
from diptych_engine.llamacpp.settings import LlamaCppSettings


def test_the_installed_library_is_the_build_that_was_declared() -> None:
    found = loading.load_library(loading.installed_library())
    assert found is loading.load_library(loading.installed_library())
    assert found.last_error() == "no reason given"


def test_a_library_with_other_defaults_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loading, "KNOWN_CONTEXT_DEFAULTS", {**KNOWN_CONTEXT_DEFAULTS, "yarn_beta_fast": 32.0}
    )
    with pytest.raises(Incompatible, match="expected default yarn_beta_fast=32, seen -1"):
        loading.Library(loading.installed_library())


def test_a_library_that_is_not_llama_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"libm\S* is not llama\.cpp b11549"):
        loading.Library(Path(ctypes.util.find_library("m") or "libm.so.6"))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Permanent, match="xllamacpp is not installed"):
        loading.installed_library()


@pytest.mark.parametrize(("cores", "threads"), [(None, 1), (1, 1), (2, 1), (8, 4)])
def test_threads_default_to_half_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert LlamaCppSettings().thread_count() == threads
    assert LlamaCppSettings(threads=3).thread_count() == 3
