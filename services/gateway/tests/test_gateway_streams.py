"""An answer is a function of its journal: in whatever pieces it comes, however late it is read."""

from random import Random
from typing import Any

import msgspec
import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason, Fence, Report, TokenEntry
from diptych_contracts.requests import Request
from diptych_contracts.sampling import Sampling, Stopping
from diptych_gateway.answering.answers import ChunkWriter, Heading, usage
from diptych_gateway.answering.patience import Limits, Patience
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.metrics import of_model
from diptych_testkit.tiny_gguf import EOS_ID, tiny_card
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

RID = RequestId("0" * 32)
CARD = tiny_card()
CODEC = TextCodec.from_card(CARD)
LIMITS = Limits(silence_s=9, total_s=9, keep_alive_s=9, slow_reader_s=9)


def stream(*stop: str) -> AnswerStream:
    request = Request(
        request_id=RID,
        gateway=Incarnation("gateway-1"),
        model="tiny",
        prompt_ids=(5, 6, 7),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=99, stop=stop),
        created_unix_ms=1_700_000_000_123,
    )
    made = AnswerStream(
        request,
        text=AnswerText(CODEC, stop),
        patience=Patience(LIMITS),
        arrived_s=10.0,
        metrics=of_model("tiny"),
    )
    made.eager = True
    return made


def ids(text: str) -> list[int]:
    return CODEC.encode(text, add_bos=False)


def tokens(*token_ids: int, index: int = 0, attempt: int = 1) -> TokenEntry:
    return TokenEntry(request_id=RID, attempt=attempt, index=index, token_ids=token_ids)


def end(reason: EndReason = EndReason.STOP, attempt: int = 1, count: int | None = None) -> End:
    return End(request_id=RID, attempt=attempt, reason=reason, tokens=count)


def fed(made: AnswerStream, *parts: Any) -> str:
    for part in parts:
        made.feed(part, now_s=11.0)
    return "".join(shown.text for shown in made.texts())


def test_pieces_are_the_same_however_late_they_are_taken() -> None:
    text = "Hello world, grüße 🙂 the end"
    all_ids = ids(text)
    at_once, one_by_one = stream(), stream()
    at_once.feed(tokens(*all_ids), now_s=11.0)
    at_once.feed(end(), now_s=11.0)
    pieces: list[Shown] = []
    for index, token in enumerate(all_ids):
        one_by_one.feed(tokens(token, index=index), now_s=11.0)
        pieces += list(one_by_one.texts())
    one_by_one.feed(end(), now_s=11.0)
    pieces += list(one_by_one.texts())
    assert pieces == list(at_once.texts())
    assert "".join(piece.text for piece in pieces) == text


def test_a_character_is_never_cut() -> None:
    emoji = ids("🙂")
    made = stream()
    assert len(emoji) > 1
    assert fed(made, tokens(*emoji[:-1])) == ""
    assert list(made.texts()) == []
    made.feed(tokens(emoji[-1], index=len(emoji) - 1), now_s=11.0)
    assert list(made.texts()) == [Shown(len(emoji) - 1, "🙂")]


def test_a_stop_string_across_tokens_is_held_back_and_never_shown() -> None:
    made = stream("###")
    assert fed(made, tokens(*ids("Yes #"))) == "Yes "
    assert fed(made, tokens(*ids("##no"), index=99)) == ""
    more = ids("## and more")
    assert fed(made, tokens(*more, index=len(ids("Yes #")))) == ""
    assert fed(made, end()) == ""


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    made = stream("###")
    assert fed(made, tokens(*ids("Yes ##")), end()) == "Yes ##"
    assert list(made.texts()) == []


def test_control_tokens_yield_no_text_but_count() -> None:
    made = stream()
    assert fed(made, tokens(*ids("Yes"), EOS_ID), end()) == "Yes"
    assert made.tokens == len(ids("Yes")) + 1


def test_after_a_fence_only_the_new_attempt_speaks() -> None:
    made = stream()
    first = ids("Hello")
    fence = Fence(request_id=RID, attempt=2)
    late = tokens(*ids(" LATE"), index=len(first), attempt=1)
    fresh = tokens(*ids(" world"), index=len(first), attempt=2)
    text = fed(made, tokens(*first), fence, late, fresh, late, end(attempt=1), end(attempt=2))
    assert text == "Hello world"
    assert made.attempt == 2
    assert made.end == end(attempt=2)


@pytest.mark.parametrize("seed", range(20))
def test_repeated_and_reordered_frames_change_nothing(seed: int) -> None:
    rng = Random(seed)
    all_ids = ids("Hello world and the rest of it")
    parts: list[Any] = [tokens(token, index=i) for i, token in enumerate(all_ids)]
    shuffled = parts + rng.sample(parts, 5) + [end(count=len(all_ids))]
    rng.shuffle(shuffled)
    assert fed(stream(), *shuffled) == "Hello world and the rest of it"


@pytest.mark.parametrize(
    ("reason", "status"), [("failed", 500), ("expired", 504), ("cancelled", 503)]
)
def test_an_end_that_is_no_finish_is_a_failure(reason: str, status: int) -> None:
    made = stream()
    made.feed(end(EndReason(reason)), now_s=11.0)
    assert made.failure is not None
    assert made.failure.status == status
    assert made.failure.should_retry is True


def test_once_tokens_were_made_the_client_is_told_not_to_repeat() -> None:
    made = stream()
    fed(made, tokens(5), end(EndReason.FAILED))
    assert made.failure is not None
    assert (b"x-should-retry", b"false") in made.failure.headers


def test_usage_counts_tokens_and_time() -> None:
    made = stream()
    fed(made, tokens(5, 6), end(EndReason.LENGTH))
    used = usage(made)
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (3, 2, 5)
    assert used.diptych.ttft_ms == 1000.0


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2), (9, 3)])
def test_usage_tells_cached_tokens_of_the_prompt_only(cached: int, told: int) -> None:
    made = stream()
    report = Report(cached_tokens=cached, engine="sim-1")
    fed(made, tokens(5), msgspec.structs.replace(end(EndReason.LENGTH), report=report))
    used = usage(made)
    assert used.prompt_tokens_details.cached_tokens == told
    assert used.diptych.engine == "sim-1"


def test_text_that_looks_like_the_chunk_itself_stays_data() -> None:
    writer = ChunkWriter(Heading(RID, 1, CARD), include_usage=True)
    text = '"content":"\0"}]}\n\ndata: [DONE]\u2028"'
    (event,) = writer.texts([Shown(4, text)])
    assert event.count(b"\n\n") == 1
    assert event.startswith(f"id: {RID}:4\ndata: ".encode())
