import re
from random import Random

from diptych_contracts.ids import new_incarnation, new_request_id, transfer_id


def test_a_request_id_is_128_bits_in_hex() -> None:
    ids = {new_request_id(Random(seed)) for seed in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)


def test_an_incarnation_names_its_service_and_this_life() -> None:
    rng = Random(1)
    first, second = (new_incarnation("decode-worker", rng) for _ in range(2))
    assert first != second
    assert re.fullmatch("decode-worker-[0-9a-f]{12}", first)


def test_both_sides_derive_the_same_transfer_id() -> None:
    request_id = new_request_id(Random(1))
    assert transfer_id(request_id, 2) == f"{request_id}.2"
    assert transfer_id(request_id, 1) != transfer_id(request_id, 2)
