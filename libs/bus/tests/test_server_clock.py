from diptych_bus.server_clock import FORGET_S, ServerClock


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.server = ServerClock(lambda: self.now_s, lambda: 7)

    def stamp(self, unix_ms: float, *, late_s: float = 0.0) -> None:
        """A message stored at `unix_ms` that was `late_s` on its way."""
        self.now_s += late_s
        self.server.stamped(unix_ms)


def test_before_a_stamp_the_own_wall_clock_counts() -> None:
    assert Clock().server.unix_ms() == 7


def test_the_servers_time_goes_on_from_its_stamp() -> None:
    clock = Clock()
    clock.stamp(1_000_000)
    clock.now_s += 2.5
    assert clock.server.unix_ms() == 1_002_500


def test_an_old_message_does_not_set_the_clock_back() -> None:
    clock = Clock()
    clock.stamp(1_000_000)
    clock.stamp(500_000, late_s=1.0)
    assert clock.server.unix_ms() == 1_001_000


def test_a_quicker_message_corrects_it() -> None:
    clock = Clock()
    clock.stamp(1_000_000, late_s=0.4)
    clock.now_s += 10.0
    clock.stamp(1_010_300)
    assert clock.server.unix_ms() == 1_010_300


def test_a_server_whose_clock_is_set_back_is_believed_after_a_while() -> None:
    clock = Clock()
    clock.stamp(9_000_000)
    for period in range(3):
        clock.now_s += FORGET_S
        clock.stamp(1_000_000 + 1000 * FORGET_S * period)
    assert clock.server.unix_ms() == 1_000_000 + 2000 * FORGET_S
