import pytest

from diptych_contracts.errors import Unverified
from diptych_contracts.prompts import (
    MAX_INLINE_TOKENS,
    PromptRef,
    compact,
    digest_of,
    packed,
    unpacked,
)
from diptych_contracts.streams import MAX_MESSAGE_BYTES
from diptych_contracts.wire import encode
from diptych_testkit.builders import a_generation, a_request


def a_ref(ids: tuple[int, ...], vocab_size: int = 1000) -> tuple[PromptRef, bytes]:
    width, data = packed(compact(vocab_size, ids))
    return PromptRef(name="r1", tokens=len(ids), width=width, digest=digest_of(data)), data


@pytest.mark.parametrize(
    ("top", "width"), [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**31 - 1, 4)]
)
def test_ids_take_the_bytes_any_of_the_model_needs_and_come_back(top: int, width: int) -> None:
    ref, data = a_ref((7, top, 0), vocab_size=top + 1)
    assert (ref.width, len(data), ref.n_bytes) == (width, 3 * width, 3 * width)
    assert tuple(unpacked(data, ref)) == (7, top, 0)


def test_what_is_not_the_prompt_is_refused() -> None:
    ref, data = a_ref((1, 2, 300))
    for wrong in (data[:-1], data[:-2] + b"\0\0", b"", data + b"\0"):
        with pytest.raises(Unverified, match="prompt r1: expected 6 bytes"):
            unpacked(wrong, ref)


def test_a_request_and_its_jobs_count_the_tokens_of_a_prompt_they_only_name() -> None:
    ref, _ = a_ref((1, 2, 300))
    assert a_request(prompt_ids=(), prompt=ref).prompt_tokens == 3
    assert a_generation(prompt_ids=(), prompt=ref).prompt_tokens == 3
    assert a_request(prompt_ids=(1, 2)).prompt_tokens == 2


def test_what_stays_inline_is_far_from_the_limit_of_a_message() -> None:
    largest = a_request(prompt_ids=(2**31,) * MAX_INLINE_TOKENS)
    assert len(encode(largest)) < MAX_MESSAGE_BYTES // 8
