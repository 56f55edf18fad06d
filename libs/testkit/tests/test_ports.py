import socket

from diptych_testkit.ports import free_port


def test_a_free_port_can_be_had_and_is_none_that_the_kernel_gives_to_clients() -> None:
    port = free_port()
    assert 10_000 <= port < 32_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))


def test_two_are_not_the_same() -> None:
    assert len({free_port() for _ in range(20)}) > 15
