import dataclasses

from diptych_bus.memory.stream import MemoryStream
from diptych_contracts.streams import TOKENS


def test_the_predecessor_is_of_the_same_subject() -> None:
    stream = MemoryStream(TOKENS)

    messages = [stream.store(f"token.{s}", b"", {}, 0.0)[1] for s in ("a", "b", "a", "b", "a")]

    assert [m.previous_seq for m in messages if m] == [0, 0, 1, 2, 3]


def test_old_messages_leave_by_age() -> None:
    stream = MemoryStream(dataclasses.replace(TOKENS, max_age_s=10.0))
    stream.store("token.a", b"1", {}, 0.0)
    stream.store("token.a", b"2", {}, 5.0)

    stream.store("token.a", b"3", {}, 11.0)

    assert [m.data for m in stream.on("token.a", after_seq=0)] == [b"2", b"3"]
    assert stream.get(1) is None
    assert stream.next_after(0) == stream.get(2)


def test_ids_are_forgotten_after_the_window() -> None:
    stream = MemoryStream(TOKENS)
    stream.store("token.a", b"", {"Nats-Msg-Id": "x"}, 0.0)

    assert stream.store("token.a", b"", {"Nats-Msg-Id": "x"}, TOKENS.dedupe_s - 0.1)[0].duplicate
    assert not stream.store("token.a", b"", {"Nats-Msg-Id": "x"}, TOKENS.dedupe_s + 0.1)[
        0
    ].duplicate
