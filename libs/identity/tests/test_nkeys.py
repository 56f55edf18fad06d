import pytest

from diptych_identity.nkeys import BadKey, KeyPair, Kind, is_public, verified


@pytest.mark.parametrize(("kind", "letter"), [("OPERATOR", "O"), ("ACCOUNT", "A"), ("USER", "U")])
def test_texts_begin_with_what_they_are(kind: str, letter: str) -> None:
    key = KeyPair.new(Kind[kind])
    assert key.public[0] == letter
    assert len(key.public) == 56
    assert key.seed[:2] == "S" + letter
    assert len(key.seed) == 58


def test_a_seed_gives_the_key_again() -> None:
    key = KeyPair.new(Kind.USER)
    again = KeyPair.of_seed(key.seed, Kind.USER)
    assert again.public == key.public
    assert verified(key.public, again.sign(b"x"), b"x")


def test_a_seed_that_others_made_is_read() -> None:
    """The example of NATS's own documentation."""
    seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
    public = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
    assert KeyPair.of_seed(seed, Kind.USER).public == public


def test_what_somebody_else_signed_or_another_text_is_not_verified() -> None:
    key, other = KeyPair.new(Kind.USER), KeyPair.new(Kind.USER)
    assert not verified(key.public, other.sign(b"x"), b"x")
    assert not verified(key.public, key.sign(b"x"), b"y")
    assert not verified(key.public, b"short", b"x")


@pytest.mark.parametrize("text", ["", "U", "!" * 56, "B" * 56, "é" * 56, "A" * 1_000_000])
def test_what_is_no_key_is_refused(text: str) -> None:
    assert not is_public(text, Kind.ACCOUNT)
    with pytest.raises(BadKey):
        KeyPair.of_seed(text, Kind.USER)


def test_a_changed_letter_is_noticed() -> None:
    public = KeyPair.new(Kind.USER).public
    swapped = public[:10] + ("A" if public[10] != "A" else "B") + public[11:]
    assert is_public(public, Kind.USER)
    assert not is_public(swapped, Kind.USER)


def test_a_seed_of_another_kind_is_refused_and_never_shown() -> None:
    key = KeyPair.new(Kind.ACCOUNT)
    with pytest.raises(BadKey) as caught:
        KeyPair.of_seed(key.seed, Kind.USER)
    assert key.seed not in str(caught.value)
    assert key.seed not in repr(key)
