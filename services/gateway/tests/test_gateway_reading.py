"""What a body's headers say of it."""

import pytest

from diptych_gateway.listening.reading import declares_more


@pytest.mark.parametrize("length", ["101", "0000101", "9" * 20, "9" * 5000])
def test_a_declared_length_may_have_any_number_of_digits(length: str) -> None:
    assert declares_more(length, 100)


@pytest.mark.parametrize("length", ["", "100", "0" * 5000 + "7", "-1", "1e9", "²", "\u0661" * 9])
def test_what_declares_no_more_is_read(length: str) -> None:
    assert not declares_more(length, 100)
