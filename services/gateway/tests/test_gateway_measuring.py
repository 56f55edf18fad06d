"""A text that cannot fit costs next to nothing, and holds nobody up."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from diptych_contracts.errors import ContextOverflow
from diptych_gateway.admission.measuring import PIECE_CHARS, check_fits, may_overflow
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text.codec import TextCodec

CODEC = TextCodec.from_card(tiny_card())


async def counted(text: str, context_tokens: int) -> tuple[bool, int]:
    """Whether it may fit, and how many characters were looked at."""
    looked_at = 0

    def count(piece: str) -> int:
        nonlocal looked_at
        looked_at += len(piece)
        return len(CODEC.encode(piece, add_bos=False))

    with ThreadPoolExecutor(1) as executor:
        try:
            await check_fits(
                [text], count, context_tokens=context_tokens, executor=executor, param="messages"
            )
        except ContextOverflow:
            return False, looked_at
    return True, looked_at


async def test_the_count_ends_where_the_context_does() -> None:
    fits, looked_at = await counted("1" * 3_900_000, 2048)
    assert (fits, looked_at) == (False, PIECE_CHARS)


@pytest.mark.parametrize("seed", range(5))
async def test_what_fits_is_never_refused(seed: int) -> None:
    rng = Random(seed)
    words = ["Hello", " world", "  ", "🙂", "日本", "\n\n", "grüße", "123", " the"]
    text = "".join(rng.choice(words) for _ in range(60_000))
    tokens = len(CODEC.encode(text, add_bos=False))
    assert (await counted(text, tokens))[0]
    assert not (await counted(text, tokens // 2))[0]


async def test_blanks_that_a_template_strips_do_not_count() -> None:
    assert await counted(" " * 3_000_000, 10) == (True, 0)


def test_short_texts_are_not_counted_twice() -> None:
    assert not may_overflow(30_000, 2048)
    assert not may_overflow(500_000, 131_072)
    assert may_overflow(40_000, 2048)


async def test_expensive_texts_hold_nobody_up(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take the thread seconds to tokenize; an ordinary long prompt waits for a piece."""
    encoded: list[int] = []
    encode = TextCodec._ids

    def counting(self: TextCodec, part: str) -> list[int]:
        encoded.append(len(part))
        return encode(self, part)

    monkeypatch.setattr(TextCodec, "_ids", counting)
    costly = [{"role": "user", "content": "1" * 3_900_000}]
    refusals = [asyncio.create_task(stack.chat(messages=costly)) for _ in range(3)]
    plain = await stack.chat(messages=[{"role": "user", "content": "Hello world " * 400}])
    assert plain.status_code == 200
    for refused in refusals:
        answer = await refused
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "messages"
    assert sum(encoded) < 6 * PIECE_CHARS
