from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych_chassis.settings import BadSettings, ServiceSettings, parse_settings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    model_path: Path
    threads: int = 2
    share_frac: float = 0.5
    warm: bool = False
    links: tuple[str, ...] = ("shm",)
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"THREADS: expected 1 or more, got {self.threads}")


def parse(environ: dict[str, str]) -> WorkerSettings:
    base = {"DIPTYCH_PREFILL_WORKER__MODEL_PATH": "/m.gguf"}
    return parse_settings(WorkerSettings, "prefill-worker", base | environ)


def test_defaults_hold_where_nothing_is_set() -> None:
    assert parse({}) == WorkerSettings(model_path=Path("/m.gguf"))


def test_every_type_is_read() -> None:
    start = "DIPTYCH_PREFILL_WORKER__"
    settings = parse(
        {
            f"{start}THREADS": "3",
            f"{start}SHARE_FRAC": "0.25",
            f"{start}WARM": "True",
            f"{start}LINKS": "shm, tcp",
            f"{start}SEED": "7",
            f"{start}OTLP_ENDPOINT": "",
            f"{start}LOG_FORMAT": "text",
        }
    )
    assert (settings.threads, settings.share_frac, settings.warm) == (3, 0.25, True)
    assert (settings.links, settings.seed) == (("shm", "tcp"), 7)
    assert (settings.otlp_endpoint, settings.log_format) == (None, "text")


def test_a_path_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/someone")
    settings = parse({"DIPTYCH_PREFILL_WORKER__MODEL_PATH": "~/m.gguf"})
    assert settings.model_path == Path("/srv/someone/m.gguf")


def test_a_services_own_variable_beats_the_shared_one() -> None:
    settings = parse(
        {
            "DIPTYCH_ALL__NATS_URL": "nats://shared:1",
            "DIPTYCH_ALL__LOG_LEVEL": "debug",
            "DIPTYCH_PREFILL_WORKER__NATS_URL": "nats://own:2",
        }
    )
    assert (settings.nats_url, settings.log_level) == ("nats://own:2", "debug")


def test_other_services_variables_are_theirs() -> None:
    assert parse({"DIPTYCH_GATEWAY__PROT": "1", "DIPTYCH_DEBUG": "1"}) == parse({})


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DIPTYCH_PREFILL_WORKER__THREDS", "2", "is no setting; after DIPTYCH_PREFILL_WORKER__"),
        ("DIPTYCH_PREFILL_WORKER__threads", "2", "is no setting"),
        ("DIPTYCH_PREFILL_WORKER__", "2", "is no setting"),
        ("DIPTYCH_GATWAY__PORT", "1", "is of no service; known: DIPTYCH_ALL__, DIPTYCH_GATEWAY__"),
        ("DIPTYCH_PREFILL__THREADS", "2", "is of no service"),
        ("DIPTYCH___THREADS", "2", "is of no service"),
        ("DIPTYCH_ALL__THREADS", "2", "is no setting; after DIPTYCH_ALL__ is known: BUS_WAIT_S"),
        ("DIPTYCH_PREFILL_WORKER__THREADS", "two", "expected a whole number, got 'two'"),
        ("DIPTYCH_PREFILL_WORKER__THREADS", "2.5", "expected a whole number"),
        ("DIPTYCH_PREFILL_WORKER__SHARE_FRAC", "nan", "expected a number, got 'nan'"),
        ("DIPTYCH_PREFILL_WORKER__SHARE_FRAC", "", "expected a number, got ''"),
        ("DIPTYCH_PREFILL_WORKER__WARM", "maybe", "expected true or false, got 'maybe'"),
        ("DIPTYCH_PREFILL_WORKER__SEED", "x", "expected a whole number or nothing, got 'x'"),
        ("DIPTYCH_PREFILL_WORKER__MODEL_PATH", "", "expected a path, got ''"),
        ("DIPTYCH_PREFILL_WORKER__NATS_URL", "", "expected a text, got ''"),
        ("DIPTYCH_ALL__LOG_LEVEL", "loud", "expected one of debug, info, warning, error"),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(BadSettings) as caught:
        parse({variable: value})
    assert str(caught.value).startswith(variable)
    assert says in str(caught.value)


def test_a_missing_required_variable_is_named() -> None:
    with pytest.raises(BadSettings, match="DIPTYCH_PREFILL_WORKER__MODEL_PATH must be set"):
        parse_settings(WorkerSettings, "prefill-worker", {})


def test_values_that_do_not_fit_together_are_told() -> None:
    with pytest.raises(BadSettings, match="THREADS: expected 1 or more, got 0"):
        parse({"DIPTYCH_PREFILL_WORKER__THREADS": "0"})


def test_reading_stops_the_start_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_settings(ServiceSettings, "gateway", {"DIPTYCH_GATEWAY__PROT": "1"})
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gateway: DIPTYCH_GATEWAY__PROT is no setting")
