"""What an operator says of paths: settings become the rules that routing goes by."""

from math import inf, nan

import pytest

from diptych_contracts.requests import KvPath, PriorityClass
from diptych_scheduler.settings import SchedulerSettings


def test_by_default_each_request_has_its_own_path_and_no_slo() -> None:
    rules = SchedulerSettings().path_rules
    assert rules.deployment is None
    assert set(rules.ttft_slo_s.values()) == {0.0}


@pytest.mark.parametrize("path", list(KvPath))
def test_one_path_for_all_can_be_named(path: KvPath) -> None:
    assert SchedulerSettings(deployment_type=path.value).path_rules.deployment is path  # type: ignore[arg-type]


def test_an_slo_is_one_for_all_classes_or_one_for_each() -> None:
    assert SchedulerSettings(ttft_slo_s=(0.45,)).path_rules.ttft_slo_s == dict.fromkeys(
        PriorityClass, 0.45
    )
    three = SchedulerSettings(ttft_slo_s=(0.2, 0.45, 10.0)).path_rules.ttft_slo_s
    assert list(three.values()) == [0.2, 0.45, 10.0]


@pytest.mark.parametrize("slos", [(), (1.0, 2.0), (-1.0,), (nan,), (inf,)])
def test_an_slo_that_is_none_stops_the_start(slos: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="TTFT_SLO_S: expected"):
        SchedulerSettings(ttft_slo_s=slos)
