"""Who waits how long for whom."""

from diptych_gateway.answering.patience import Due, Limits, Patience

LIMITS = Limits(silence_s=65, total_s=3605, keep_alive_s=10, slow_reader_s=30, last_word_s=2)


def ticked(patience: Patience, seconds: int, *, connected: bool = True) -> list[Due]:
    due = [patience.tick(1.0, connected=connected) for _ in range(seconds)]
    return [d for d in due if d is not Due.NOTHING]


def test_a_quiet_stream_gets_a_keep_alive() -> None:
    patience = Patience(LIMITS)
    assert ticked(patience, 9) == []
    assert ticked(patience, 1) == [Due.KEEP_ALIVE]
    patience.sending()
    patience.sent()
    assert ticked(patience, 9) == []


def test_a_forgotten_request_expires_once_and_is_then_given_up() -> None:
    patience = Patience(LIMITS)
    due = [d for d in ticked(patience, 70) if d is not Due.KEEP_ALIVE]
    assert due[0] is Due.EXPIRE
    assert Due.EXPIRE not in due[1:]
    assert due[1] is Due.GIVE_UP


def test_a_word_of_the_request_starts_the_silence_again() -> None:
    patience = Patience(LIMITS)
    ticked(patience, 60)
    patience.heard()
    assert Due.EXPIRE not in ticked(patience, 60)


def test_silence_does_not_count_while_the_bus_is_away() -> None:
    patience = Patience(LIMITS)
    assert Due.EXPIRE not in ticked(patience, 600, connected=False)
    assert Due.EXPIRE in ticked(patience, 70)


def test_the_total_deadline_counts_always() -> None:
    patience = Patience(LIMITS)
    assert Due.EXPIRE in ticked(patience, 3606, connected=False)


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    patience = Patience(LIMITS)
    patience.sending()
    assert ticked(patience, 30) == []
    assert ticked(patience, 1) == [Due.DISCONNECT]


def test_an_answer_that_has_ended_only_waits_for_its_client() -> None:
    patience = Patience(LIMITS)
    patience.ended()
    assert set(ticked(patience, 4000)) == {Due.KEEP_ALIVE}
