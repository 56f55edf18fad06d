import pytest

from diptych_contracts.codecs import CODECS, DELTA, INT8, LOSSLESS, RAW
from diptych_contracts.errors import Permanent
from diptych_policy.codecs import (
    Bandwidths,
    CodecChoice,
    check_setting,
    choose_codec,
    hand_off_s,
)

PROMPT_BYTES = 2000 * 23_000


def chosen(bytes_s, budget_s, *, setting="auto", allowed=CODECS):
    return choose_codec(setting, allowed, n_bytes=PROMPT_BYTES, bytes_s=bytes_s, budget_s=budget_s)


@pytest.mark.parametrize("budget_s", [0.001, 0.05, 0.45, 10.0])
def test_shared_memory_and_rdma_stay_raw(budget_s):
    assert chosen(5e9, budget_s) == RAW
    assert chosen(0.4e9, budget_s) == RAW


def test_what_is_in_time_as_it_is_loses_nothing():
    assert chosen(100e6, 1.0) == RAW


@pytest.mark.parametrize(
    ("bytes_s", "budget_s", "expected"),
    [
        (12.5e6, 4.0, RAW),
        (12.5e6, 3.4, LOSSLESS),
        (12.5e6, 2.0, INT8),
        (12.5e6, 1.4, DELTA),
        (12.5e6, 0.05, DELTA),
        (50e6, 0.8, INT8),
    ],
)
def test_a_slow_link_gets_what_loses_least_and_is_in_time(bytes_s, budget_s, expected):
    assert chosen(bytes_s, budget_s) == expected


def test_nothing_that_is_not_allowed_is_chosen():
    assert chosen(1e6, 0.05, allowed=(RAW, LOSSLESS)) == LOSSLESS
    assert chosen(1e6, 0.05, allowed=(RAW,)) == RAW
    assert chosen(1e6, 0.05, allowed=()) == RAW


def test_a_setting_is_obeyed():
    assert chosen(5e9, 10.0, setting=INT8, allowed=()) == INT8
    assert chosen(1e3, 0.0, setting=RAW) == RAW


def test_a_link_that_was_not_measured_gets_raw():
    assert chosen(None, 0.001) == RAW


def test_encoding_is_never_chosen_where_it_costs_more_than_it_saves():
    for bytes_s in (1e6, 1e7, 5e7, 1e8, 2e8, 5e8, 1e9):
        codec = chosen(bytes_s, 0.0)
        assert hand_off_s(codec, PROMPT_BYTES, bytes_s) <= hand_off_s(RAW, PROMPT_BYTES, bytes_s)


def test_bandwidths_are_averages_of_what_crossed_lately():
    seen = Bandwidths()
    seen.crossed("tcp a", 1000, 0.5)
    assert seen.bytes_s("tcp a") is None
    seen.crossed("tcp a", 1_000_000, 0.1)
    seen.crossed("tcp a", 1_000_000, 0.05)
    seen.crossed("tcp a", 1_000_000, 0.0)
    assert seen.bytes_s("tcp a") == pytest.approx(1.3e7)
    assert seen.bytes_s("tcp b") is None


def test_only_so_many_links_are_remembered():
    seen = Bandwidths(most=2)
    for link in "abc":
        seen.crossed(link, 1_000_000, 1.0)
    assert [seen.bytes_s(link) for link in "abc"] == [None, 1e6, 1e6]


def test_a_worker_asks_by_what_it_has_measured_of_that_link():
    choice = CodecChoice("auto", (RAW, INT8), budget_s=0.1, block=(1_474_560, 64))
    assert choice.codec("tcp d1", 2000) == RAW
    choice.crossed("tcp d1", 10_000_000, 1.0)
    assert choice.codec("tcp d1", 2000) == INT8
    assert choice.codec("tcp d2", 2000) == RAW
    assert choice.codec("tcp d1", 10) == RAW  # in time as it is
    assert CodecChoice().codec("tcp d1", 2000) == RAW


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("gzip", (RAW,)), (RAW, (RAW, "gzip")), ("auto", (RAW, "auto")), (RAW, ("auto",)), ("", ())],
)
def test_a_codec_nobody_knows_stops_the_start(setting, allowed):
    with pytest.raises(Permanent, match="unknown KV codec"):
        check_setting(setting, allowed)


def test_every_codec_and_auto_can_be_set():
    for setting in (*CODECS, "auto"):
        check_setting(setting, CODECS)
