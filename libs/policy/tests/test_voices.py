import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import AttemptFailed, End, EndReason, Fence, Started, TokenEntry
from diptych_contracts.wire import decode, encode
from diptych_policy.journal import FORGED, NOTHING, JournalPart, RequestView, spoken
from diptych_policy.voices import VOICE_BYTES, attempt_voice, owner_voice, secret_of
from diptych_testkit.builders import a_generation, a_request

SECRET = bytes(range(16))
RID = RequestId("r1")
FIRST, SECOND, OWNER = attempt_voice(SECRET, 1), attempt_voice(SECRET, 2), owner_voice(SECRET)
W = Incarnation("w")


def entry(voice: bytes, *, attempt: int = 1, index: int = 0) -> TokenEntry:
    return TokenEntry(request_id=RID, attempt=attempt, index=index, token_ids=(5,), voice=voice)


def end(voice: bytes, *, attempt: int = 1) -> End:
    return End(request_id=RID, attempt=attempt, reason=EndReason.STOP, voice=voice)


def fence(voice: bytes, *, attempt: int = 2) -> Fence:
    return Fence(request_id=RID, attempt=attempt, voice=voice)


def facts(voice: bytes, *, attempt: int = 1) -> list[JournalPart]:
    return [
        Started(request_id=RID, attempt=attempt, worker=W, phase="decode", voice=voice),
        AttemptFailed(request_id=RID, attempt=attempt, worker=W, reason="x", voice=voice),
    ]


@pytest.fixture
def view() -> RequestView:
    return RequestView(RID, secret=SECRET)


def test_voices_differ_and_say_nothing_of_the_secret() -> None:
    voices = {FIRST, SECOND, OWNER, attempt_voice(b"another", 1), owner_voice(b"another")}
    assert len(voices) == 5
    assert {len(voice) for voice in voices} == {VOICE_BYTES}
    assert secret_of(b"key", "r1") != secret_of(b"key", "r2")


def test_who_has_no_secret_has_no_voice() -> None:
    assert (attempt_voice(b"", 1), owner_voice(b""), secret_of(b"", "r1")) == (b"", b"", b"")


def test_each_voice_says_what_is_its_to_say(view: RequestView) -> None:
    assert view.apply(entry(FIRST)).new_ids == (5,)
    assert [view.apply(fact) for fact in facts(FIRST)] == [NOTHING, NOTHING]
    assert view.apply(fence(OWNER)).attempt == 2
    assert view.apply(entry(SECOND, attempt=2, index=1)).new_ids == (5,)
    assert view.apply(end(SECOND, attempt=2)).end is not None
    assert view.forged == 0


def test_an_owner_ends_every_attempt(view: RequestView) -> None:
    assert view.apply(end(OWNER)).end is not None


@pytest.mark.parametrize("voice", [b"", b"\0" * 16, FIRST[:15], SECOND, attempt_voice(b"x", 1)])
def test_everything_else_is_dropped_and_counted(view: RequestView, voice: bytes) -> None:
    said = [entry(voice), end(voice), fence(voice), *facts(voice)]
    for part in said:
        assert view.apply(part) is FORGED
    assert (view.token_ids, view.end, view.attempt, view.forged) == ([], None, 1, len(said))


def test_an_owner_samples_no_tokens_and_a_worker_makes_no_fence(view: RequestView) -> None:
    for part in (entry(OWNER), fence(FIRST), *facts(OWNER)):
        assert view.apply(part) is FORGED


def test_a_replaced_attempt_is_late_not_a_forger(view: RequestView) -> None:
    view.apply(fence(OWNER))
    assert view.apply(entry(FIRST)) is NOTHING
    assert view.apply(entry(FIRST, attempt=2)) is FORGED
    assert view.forged == 1


def test_a_reader_without_the_secret_believes_everybody() -> None:
    view = RequestView(RID)
    assert view.apply(entry(FIRST)).new_ids == (5,)
    assert view.apply(fence(b"")).attempt == 2
    assert view.apply(end(b"", attempt=2)).end is not None


def test_an_end_is_kept_without_its_voice(view: RequestView) -> None:
    plain = end(b"")
    assert view.apply(spoken(plain, SECRET)).end == plain
    assert view.end == plain


def test_neither_secret_nor_voice_is_shown() -> None:
    shown = f"{a_request(secret=SECRET)!r} {a_generation(voice=FIRST)!r} {entry(FIRST)!r} {view!r}"
    assert repr(SECRET) not in shown
    assert repr(FIRST) not in shown
    assert "secret=<secret>" in shown
    assert "voice=<voice>" in shown
    assert repr(RequestView(RID, secret=SECRET)).count("\\x0") == 0


def test_an_older_process_reads_what_has_a_voice_and_is_read() -> None:
    """It knows no such field; what it writes has none."""
    assert decode(encode(entry(b"")), TokenEntry).voice == b""
    assert b"voice" not in encode(entry(b""))
