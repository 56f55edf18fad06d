from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_engine import adapters
from diptych_engine.adapters import AdapterSettings, make_engine, read_options
from diptych_engine.sim_card import sim_card


class Options(msgspec.Struct, forbid_unknown_fields=True):
    tensor_parallel: int = 1


def settings(name: str = "toy", **options: Any) -> AdapterSettings:
    return AdapterSettings(
        name=name,
        card=sim_card(model="m"),
        role=Role.DECODE,
        options=options,
        kv_tokens=4096,
        max_sequences=4,
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    known: dict[str, str] = {}
    monkeypatch.setattr(adapters, "ADAPTERS", known)
    return known


def test_every_adapter_is_named_as_a_module_and_its_function() -> None:
    for where in adapters.ADAPTERS.values():
        module, _, function = where.partition(":")
        assert module.startswith("diptych_engine.")
        assert function.isidentifier()


def test_an_unknown_engine_is_refused_with_those_there_are(registered: dict[str, str]) -> None:
    registered["triton"] = "nowhere:make"
    with pytest.raises(Permanent, match="unknown engine 'toy': expected one of triton"):
        make_engine(settings())


def test_a_missing_client_is_named(registered: dict[str, str]) -> None:
    registered["toy"] = "diptych_engine.no_such_module:make"
    with pytest.raises(Permanent, match=r"'toy' needs .*no_such_module"):
        make_engine(settings())


def test_a_factory_is_given_the_settings(registered: dict[str, str]) -> None:
    registered["toy"] = f"{__name__}:make_toy"
    assert make_engine(settings(tensor_parallel=2)) == ("toy", 2)  # type: ignore[comparison-overlap]


def make_toy(given: AdapterSettings) -> Any:
    return (given.name, given.options_as(Options).tensor_parallel)


@pytest.mark.parametrize(
    ("options", "told"), [({"tensor_paralel": 2}, "tensor_paralel"), ({"tensor_parallel": "2"}, "")]
)
def test_options_are_judged_by_name_and_type(options: dict[str, Any], told: str) -> None:
    with pytest.raises(Permanent, match=f"options of engine 'toy': .*{told}"):
        settings(**options).options_as(Options)


def test_options_come_from_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("tensor_parallel = 2\n[kv_cache]\ndtype = 'fp8'\n")
    assert read_options(path) == {"tensor_parallel": 2, "kv_cache": {"dtype": "fp8"}}
    assert read_options(None) == {}


@pytest.mark.parametrize("data", [b"a = ", b"\xff\xfe", b"# " + b"x" * 65_536])
def test_a_file_of_something_else_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_bytes(data)
    with pytest.raises(Permanent, match=r"engine\.toml"):
        read_options(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match=r"absent\.toml: No such file"):
        read_options(tmp_path / "absent.toml")


def test_kv_of_two_engines_never_mixes() -> None:
    one, other = settings("vllm"), settings("sglang")
    assert one.fingerprint(dtype="bf16") != other.fingerprint(dtype="bf16")
    assert one.fingerprint(dtype="bf16") != one.fingerprint(dtype="fp8")
    assert one.fingerprint(dtype="bf16").base == other.fingerprint(dtype="fp8").base
    assert one.layout(block_tokens=32, dtype="bf16").slot_bytes == 0
