from diptych_bus.ring import MAX_BYTES, MAX_ENTRIES, RESEND_S, WINDOW, Ring


def filled(count: int) -> Ring:
    ring = Ring()
    for n in range(count):
        ring.add("token.g", str(n).encode())
    return ring


def taken(ring: Ring, now_s: float = 0.0) -> list[int]:
    numbers = []
    while entry := ring.take(now_s):
        numbers.append(entry.number)
    return numbers


def test_entries_are_sent_once_in_order() -> None:
    ring = filled(3)

    assert taken(ring) == [0, 1, 2]
    assert taken(ring) == []
    ring.add("token.g", b"3")
    assert taken(ring) == [3]


def test_the_window_limits_what_is_in_flight() -> None:
    ring = filled(WINDOW + 10)

    assert len(taken(ring)) == WINDOW
    ring.ack(5, 0.0)
    assert taken(ring) == [WINDOW]


def test_a_rewind_sends_the_unacknowledged_again_oldest_first() -> None:
    ring = filled(5)
    taken(ring)
    ring.ack(0, 0.0)
    ring.ack(2, 0.0)
    ring.add("token.g", b"5")

    ring.rewind()

    assert taken(ring) == [1, 3, 4, 5]


def test_acks_after_a_rewind_free_the_right_slots() -> None:
    ring = filled(WINDOW + 5)
    taken(ring)
    ring.rewind()
    ring.ack(0, 0.0)
    ring.ack(1, 0.0)

    assert taken(ring) == list(range(2, WINDOW + 2))
    ring.ack(1, 0.0)
    assert taken(ring) == []
    ring.ack(2, 0.0)
    assert taken(ring) == [WINDOW + 2]


def test_silence_makes_all_due_and_the_wait_doubles() -> None:
    ring = filled(2)
    taken(ring, 10.0)
    assert not ring.due(10.0 + RESEND_S - 0.01)
    assert ring.due(10.0 + RESEND_S)

    ring.resend()
    assert taken(ring, 11.0) == [0, 1]
    assert not ring.due(12.5)
    assert ring.due(13.0)


def test_an_ack_postpones_and_the_last_one_ends_the_wait() -> None:
    ring = filled(2)
    taken(ring, 0.0)

    ring.ack(0, 0.9)
    assert not ring.due(1.5)
    ring.ack(1, 1.0)

    assert not ring.due(100.0)
    assert len(ring) == 0


def test_a_refusal_is_due_soon() -> None:
    ring = filled(1)
    taken(ring, 0.0)

    ring.refused(0.2)

    assert ring.due(0.31)


def test_oldest_tells_what_is_acknowledged() -> None:
    ring = filled(3)
    taken(ring)
    assert (ring.oldest, ring.end) == (0, 3)

    ring.ack(1, 0.0)
    assert ring.oldest == 0
    ring.ack(0, 0.0)
    assert ring.oldest == 2
    ring.ack(2, 0.0)
    assert ring.oldest == 3


def test_the_ring_is_full_by_entries_or_bytes_and_still_takes_more() -> None:
    by_entries = filled(MAX_ENTRIES)
    by_bytes = Ring()
    for _ in range(MAX_BYTES // 2**20):
        by_bytes.add("token.g", bytes(2**20))

    assert by_entries.full
    assert by_bytes.full
    by_bytes.add("token.g", b"x")
    taken(by_bytes)
    by_bytes.ack(0, 0.0)
    by_bytes.ack(1, 0.0)
    assert not by_bytes.full
