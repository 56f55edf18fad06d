from diptych_contracts.errors import InvalidRequest, Permanent
from diptych_contracts.tracebacks import HIDDEN, told

SECRET = "xylophone"


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as err:
        return err


def test_where_it_was_raised_is_told_and_what_it_repeats_is_not() -> None:
    text = told(caught(KeyError(SECRET)))
    assert "test_tracebacks.py" in text
    assert "raise error from cause" in text
    assert f"KeyError: {HIDDEN}" in text
    assert SECRET not in text


def test_our_own_words_are_told() -> None:
    assert "Permanent: no such model" in told(caught(Permanent("no such model")))
    assert "AssertionError: one end" in told(caught(AssertionError("one end")))
    assert "[Errno 2] No such file" in told(caught(FileNotFoundError(2, "No such file", SECRET)))
    refused = InvalidRequest(f"'role': saw {SECRET!r}", param="role")
    assert SECRET not in told(caught(refused))


def test_causes_contexts_and_groups_are_told_without_their_messages() -> None:
    inner = caught(ValueError(SECRET), caught(UnicodeError(SECRET)))
    group = caught(ExceptionGroup(SECRET, [inner, TypeError(SECRET)]))
    try:
        try:
            raise group
        except ExceptionGroup:
            raise Permanent("a turn failed")  # noqa: B904
    except Permanent as err:
        text = told(err)
    for kind in ("ExceptionGroup", "ValueError", "UnicodeError", "TypeError", "a turn failed"):
        assert kind in text
    assert SECRET not in text


def test_one_that_is_its_own_cause_ends() -> None:
    error = KeyError("a")
    error.__cause__ = error
    assert "KeyError" in told(error)
