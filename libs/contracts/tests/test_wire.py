import msgspec
import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import JobAccepted, JobAnswer, JobRefused, RefusalReason
from diptych_contracts.journal import Fence
from diptych_contracts.wire import decode, encode

FENCE = Fence(request_id=RequestId("r"), attempt=2)


def test_a_message_travels_as_a_tagged_map() -> None:
    data = encode(FENCE)
    assert decode(data, Fence) == FENCE
    assert decode(memoryview(data), Fence) == FENCE
    assert msgspec.msgpack.decode(data) == {"type": "fence.1", "request_id": "r", "attempt": 2}


def test_a_union_is_told_apart_by_its_tags() -> None:
    accepted = JobAccepted(request_id=RequestId("r"), attempt=1)
    refused = JobRefused(request_id=RequestId("r"), attempt=1, reason=RefusalReason.NO_ROOM)
    assert decode(encode(accepted), JobAnswer) == accepted
    assert decode(encode(refused), JobAnswer) == refused


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not messagepack",
        encode(FENCE)[:-1],
        encode(FENCE) + b"\x00",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "fence.1", "request_id": "r"}),
        msgspec.msgpack.encode({"type": "fence.2", "request_id": "r", "attempt": 1}),
        msgspec.msgpack.encode({"type": "fence.1", "request_id": "r", "attempt": "1"}),
        msgspec.msgpack.encode({"type": "fence.1", "request_id": 7, "attempt": 1}),
        b"\x83\xa4type\xa7fence.1\xaarequest_id\xa1\xff\xa7attempt\x01",
    ],
)
def test_garbage_is_permanent_and_says_what_was_expected(data: bytes) -> None:
    with pytest.raises(Permanent, match=f"expected a Fence message, got {len(data)} bytes"):
        decode(data, Fence)


def test_garbage_instead_of_a_union_names_its_members() -> None:
    with pytest.raises(Permanent, match=r"expected a .*JobAccepted \| .*JobRefused message"):
        decode(b"\x00", JobAnswer)


@pytest.mark.parametrize("data", [b"", encode(FENCE).replace(b"\x83", b"\x84", 1) + b"\xa1x"])
def test_deep_nesting_is_garbage_too(data: bytes) -> None:
    """Where an unknown field is passed over, msgspec gives up with a RecursionError."""
    with pytest.raises(Permanent, match="expected a Fence message"):
        decode(data + b"\x91" * 100_000 + b"\x01", Fence)


def test_what_is_said_of_garbage_does_not_repeat_it() -> None:
    data = msgspec.msgpack.encode({"type": "x" * 100_000})
    with pytest.raises(Permanent, match="got 100011 bytes") as caught:
        decode(data, JobAnswer)
    assert len(str(caught.value)) < 600
