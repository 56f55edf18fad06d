import msgspec
import pytest

from diptych_policy.prefixes import Prefix, PromptBlocks, block_hashes
from diptych_testkit.builders import a_request, by_reference

TOKENS = tuple(range(1000, 1130))


def test_every_full_block_has_a_hash_and_the_rest_has_none() -> None:
    counts = {n: len(block_hashes("t", "m", TOKENS[:n], 64)) for n in (0, 63, 64, 65, 127, 128)}
    assert counts == {0: 0, 63: 0, 64: 1, 65: 1, 127: 1, 128: 2}
    assert all(0 <= block < 2**64 for block in block_hashes("t", "m", TOKENS, 64))


def test_a_hash_names_all_that_comes_before() -> None:
    one = block_hashes("t", "m", TOKENS, 64)
    assert block_hashes("t", "m", TOKENS[:64], 64) == one[:1]
    changed_late = block_hashes("t", "m", (*TOKENS[:100], 7, *TOKENS[101:]), 64)
    assert changed_late[0] == one[0]
    assert changed_late[1] != one[1]
    changed_early = block_hashes("t", "m", (7, *TOKENS[1:]), 64)
    assert not set(changed_early) & set(one)


def test_tenant_and_model_are_part_of_every_hash() -> None:
    one = set(block_hashes("ab", "c", TOKENS, 64))
    for tenant, model in (("ab", "d"), ("x", "c"), ("a", "bc"), ("", "abc"), ("abc", "")):
        assert not one & set(block_hashes(tenant, model, TOKENS, 64))


def test_hashes_are_the_same_in_every_process() -> None:
    assert block_hashes("default", "base", (1, 2, 3, 4), 2) == (
        10923445588436021552,
        11917693182490630233,
    )


@pytest.mark.parametrize("strange", [2**31, -(2**31) - 1, 2**63])
def test_a_block_with_an_id_that_no_model_has_ends_the_hashes(strange: int) -> None:
    """Whoever may store a request, or ask for a ticket, could end every process that hashes it."""
    token_ids = (*TOKENS[:70], strange, *TOKENS[71:])
    assert block_hashes("t", "m", token_ids, 64) == block_hashes("t", "m", TOKENS[:64], 64)
    assert Prefix.of("t", "m", token_ids, 64) == Prefix.of("t", "m", TOKENS[:64], 64)
    assert PromptBlocks("t", token_ids).hashes("m", 16) == block_hashes("t", "m", TOKENS[:64], 16)


def test_a_prefix_is_the_full_blocks() -> None:
    prefix = Prefix.of("t", "m", TOKENS, 64)
    assert prefix == Prefix("t", TOKENS[:128], block_hashes("t", "m", TOKENS, 64))


def test_a_prompt_is_hashed_once_per_model_and_block_size() -> None:
    prompt = PromptBlocks("t", TOKENS)
    assert prompt.hashes("m", 64) == block_hashes("t", "m", TOKENS, 64)
    assert prompt.hashes("m", 64) is prompt.hashes("m", 64)
    assert prompt.hashes("m", 16) == block_hashes("t", "m", TOKENS, 16)


def test_a_prompt_kept_elsewhere_has_the_hashes_its_reference_names() -> None:
    request = a_request(prompt_ids=TOKENS)
    known = block_hashes(request.tenant, "m", TOKENS, 64)[:1]
    named, _ = by_reference(request)
    assert named.prompt is not None
    ref = msgspec.structs.replace(named.prompt, model_base="m", block_tokens=64, block_hashes=known)
    prompt = PromptBlocks.of(msgspec.structs.replace(named, prompt=ref))
    assert prompt.hashes("m", 64) == known
    assert prompt.hashes("other", 64) == ()
    whole = PromptBlocks.of(request)
    assert whole.hashes("m", 64) == block_hashes(request.tenant, "m", TOKENS, 64)
