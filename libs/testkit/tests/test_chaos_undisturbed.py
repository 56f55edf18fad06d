from pathlib import Path

import pytest

from diptych_testkit.chaos.asking import LONGEST_TOKENS, Api, Ask, catalogue
from diptych_testkit.chaos.undisturbed import Undisturbed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        computed = Undisturbed(catalogue()[:2], engine="sim")
        assert computed.compute()
        remembered = Undisturbed(catalogue()[:2], engine="sim")
        assert not remembered.compute()
    ask = Ask(prompt=1, api=Api.CHAT, max_tokens=LONGEST_TOKENS)
    assert remembered.expected(ask) == computed.expected(ask)
    return remembered


def test_a_shorter_answer_is_the_beginning_of_a_longer_one(undisturbed: Undisturbed) -> None:
    whole = undisturbed.token_ids(Ask(prompt=0, api=Api.CHAT, max_tokens=LONGEST_TOKENS))
    some = undisturbed.token_ids(Ask(prompt=0, api=Api.CHAT, max_tokens=20))
    assert some == whole[:20]
    assert undisturbed.expected(Ask(prompt=0, api=Api.CHAT, max_tokens=20)).finish == "length"


def test_pieces_are_placed_as_their_api_places_them(undisturbed: Undisturbed) -> None:
    chat = undisturbed.expected(Ask(prompt=0, api=Api.CHAT, max_tokens=40))
    response = undisturbed.expected(Ask(prompt=0, api=Api.RESPONSES, max_tokens=40))
    assert [p.text for p in chat.pieces] == [p.text for p in response.pieces]
    assert [p.place for p in response.pieces] == list(range(len(response.pieces)))
    assert all(piece.place < 40 for piece in chat.pieces)


def test_half_a_character_at_the_limit_comes_after_the_last_token(
    undisturbed: Undisturbed,
) -> None:
    undisturbed._answers[1] = undisturbed._codec.encode("oké", add_bos=False)
    chat = undisturbed.expected(Ask(prompt=1, api=Api.CHAT, max_tokens=3))
    assert [(piece.place, piece.text) for piece in chat.pieces] == [
        (0, "o"),
        (1, "k"),
        (3, "\ufffd"),
    ]


def test_an_answer_stops_by_itself_only_if_more_was_allowed(undisturbed: Undisturbed) -> None:
    undisturbed._answers[0] = undisturbed._answers[0][:30]
    for max_tokens, finish in ((29, "length"), (30, "length"), (31, "stop")):
        ask = Ask(prompt=0, api=Api.CHAT, max_tokens=max_tokens)
        assert undisturbed.expected(ask).finish == finish


def test_what_is_remembered_lies_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Undisturbed(catalogue()[:1], engine="sim").compute()
    (remembered,) = tmp_path.rglob("*.msgpack")
    assert remembered.parent == tmp_path / "diptych/chaos"
