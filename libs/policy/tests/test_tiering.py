import msgspec
import pytest

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_policy.tiering import RestoreCosts, tenant_tag, tier_keys

FINGERPRINT = Fingerprint(base="b1", weights="Q4_1")
LAYOUT = KvLayout(
    layout_id="llama-seq-v1",
    engine_build="b11549",
    block_tokens=4,
    slot_bytes=1000,
    dtype="f16",
)
TOKENS = tuple(range(100, 114))


def keys(tenant="a", fingerprint=FINGERPRINT, layout=LAYOUT, tokens=TOKENS):
    return [key.block for key in tier_keys(tenant, fingerprint, layout, tokens)]


def test_each_full_block_has_a_key_and_a_tail_has_none() -> None:
    found = tier_keys("a", FINGERPRINT, LAYOUT, TOKENS)
    assert len(found) == 3 == len({key.block for key in found})
    assert {key.tenant_tag for key in found} == {tenant_tag("a")}
    assert tier_keys("a", FINGERPRINT, LAYOUT, TOKENS[:3]) == ()
    assert tier_keys("a", FINGERPRINT, LAYOUT, ()) == ()


@pytest.mark.parametrize("strange", [2**31, -(2**31) - 1])
def test_there_is_no_key_where_an_id_is_no_model_s(strange: int) -> None:
    assert keys(tokens=(*TOKENS, strange)) == []


def test_a_key_names_all_tokens_up_to_its_end() -> None:
    longer = keys(tokens=(*TOKENS[:12], 7, 8, 9, 10))
    assert longer[:3] == keys()
    other = keys(tokens=(1, *TOKENS[1:]))
    assert not set(other) & set(keys())
    late = keys(tokens=(*TOKENS[:8], 1, *TOKENS[9:]))
    assert late[:2] == keys()[:2]
    assert late[2] != keys()[2]


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": "b"},
        {"fingerprint": msgspec.structs.replace(FINGERPRINT, base="b2")},
        {"fingerprint": msgspec.structs.replace(FINGERPRINT, weights="Q8_0")},
        *(
            {"layout": msgspec.structs.replace(LAYOUT, **{name: value})}
            for name, value in {
                "layout_id": "other",
                "engine_build": "b11550",
                "slot_bytes": 1001,
                "dtype": "q8_0",
                "version": 2,
                "layers": 3,
                "kv_heads": 3,
                "head_dim": 64,
                "tp": 2,
            }.items()
        ),
    ],
)
def test_whatever_the_kv_depends_on_is_in_its_key(changed) -> None:
    assert not set(keys(**changed)) & set(keys())


def test_names_that_run_into_each_other_are_told_apart() -> None:
    one = msgspec.structs.replace(FINGERPRINT, base="ab", weights="c")
    other = msgspec.structs.replace(FINGERPRINT, base="a", weights="bc")
    assert not set(keys(fingerprint=one)) & set(keys(fingerprint=other))


def test_tokens_may_come_as_any_sequence() -> None:
    assert keys(tokens=list(TOKENS)) == keys() == keys(tokens=memoryview_of(TOKENS))


def memoryview_of(tokens):
    from array import array

    return array("i", tokens)


def costs(*, prefill_tokens_s=1000.0, import_bytes_s=1e9) -> RestoreCosts:
    made = RestoreCosts(block_tokens=64, block_bytes=1_000_000)
    made.prefilled(round(prefill_tokens_s), 1.0)
    made.imported(round(import_bytes_s), 1.0)
    return made


def test_restoring_takes_what_reading_and_importing_take() -> None:
    made = costs()
    assert made.recompute_s(10) == pytest.approx(0.64)
    assert made.import_s(10) == pytest.approx(0.01)
    assert made.spare_s(10) == pytest.approx(0.63)


def test_blocks_of_a_fast_tier_are_read_and_those_of_a_slow_one_computed() -> None:
    made = costs()
    assert made.worth([0.001] * 10) == 10
    assert made.worth([0.1] * 10) == 0
    assert made.worth([0.001] * 4 + [0.1] * 6) == 4


def test_a_slow_block_before_many_fast_ones_is_read_too() -> None:
    made = costs()
    assert made.worth([0.1] + [0.001] * 9) == 10
    assert made.worth([0.1, 0.001]) == 0 or made.worth([0.1, 0.001]) == 2


def test_what_computes_faster_than_it_is_imported_is_never_read() -> None:
    assert costs(prefill_tokens_s=1e6, import_bytes_s=1e8).worth([0.0] * 10) == 0


def test_nothing_found_is_nothing_read() -> None:
    assert costs().worth([]) == 0


def test_until_prefill_is_measured_restoring_is_believed_in() -> None:
    made = RestoreCosts(block_tokens=64, block_bytes=1_476_080)
    assert made.worth([0.02] * 23) == 23
    assert made.spare_s(23) > 20


def test_a_measurement_counts_at_once_and_later_ones_by_and_by() -> None:
    made = costs(prefill_tokens_s=100)
    assert made.recompute_s(1) == pytest.approx(0.64)
    made.prefilled(200, 1.0)
    assert made.recompute_s(1) == pytest.approx(64 / 130)
    made.prefilled(1, 1.0)  # a decode step says nothing of prefill
    made.prefilled(64, 0.0)
    assert made.recompute_s(1) == pytest.approx(64 / 130)
