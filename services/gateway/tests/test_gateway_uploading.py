"""Forms, well-made and hostile."""

from random import Random
from typing import Any

import pytest

from diptych_bus.memory import MemoryBroker
from diptych_contracts.errors import DiptychError, InvalidRequest
from diptych_gateway.errors import from_error
from diptych_gateway.files.store import ContentWriter
from diptych_gateway.files.uploading import Form, read_form
from diptych_gateway.listening.reading import ClientGone

GOOD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
    b"line 1\nline 2\r\n--b--\r\n"
)
CONTENT = b"line 1\nline 2"
TYPE = b"multipart/form-data; boundary=b"


async def read(pieces: list[bytes], kind: bytes = TYPE, **limits: Any) -> tuple[Form, bytes]:
    bus = MemoryBroker().connect("g")
    writer = ContentWriter(bus, "c")
    left = list(pieces)

    async def receive() -> Any:
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    chosen: dict[str, Any] = {"max_bytes": 10_000, "silence_s": 1.0} | limits
    scope = {"headers": [(b"content-type", kind)]}
    try:
        form = await read_form(scope, receive, writer, **chosen)
        data = b""
        for number in range(writer.n_parts):
            data += await bus.get_object("file-parts", f"c.{number}") or b""
        return form, data
    finally:
        await bus.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
async def test_a_form_is_the_same_however_it_is_cut(size: int) -> None:
    pieces = [GOOD[n : n + size] for n in range(0, len(GOOD), size)]
    form, data = await read(pieces)
    assert (form.fields, form.filename, data) == ({"purpose": "batch"}, "a.jsonl", CONTENT)


async def test_a_client_that_leaves_has_sent_nothing() -> None:
    with pytest.raises(ClientGone):
        await read([])


@pytest.mark.parametrize(
    "kind",
    [b"", b"text/plain", b"multipart/form-data", b"multipart/form-data; boundary=", b"\xff\xfe; ="],
)
async def test_another_type_is_refused(kind: bytes) -> None:
    with pytest.raises(DiptychError) as caught:
        await read([GOOD], kind)
    assert from_error(caught.value).status == 415


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_comes_is_read_or_refused(seed: int) -> None:
    rng = Random(seed)
    statuses: set[int] = set()
    for _ in range(25):
        body = bytearray(GOOD)
        for _ in range(rng.randint(1, 12)):
            at = rng.randrange(len(body))
            match rng.randrange(4):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at : at + rng.randrange(20)]
                case 2:
                    body[at:at] = rng.choice([b"\r\n", b"--b", b"\0", b";", b'"', b"\xff" * 9])
                case 3:
                    body += body[: rng.randrange(200)]
        kind = TYPE if rng.random() < 0.8 else TYPE + bytes(rng.randrange(256) for _ in range(9))
        size = rng.choice([1, 16, 4096])
        try:
            await read([bytes(body[n : n + size]) for n in range(0, len(body), size)], kind)
        except ClientGone:
            continue
        except DiptychError as err:
            statuses.add(from_error(err).status)
    assert statuses <= {400, 413, 415}


async def test_headers_of_a_part_are_bounded() -> None:
    long = b"--b\r\nX: " + b"y" * 10_000 + b"\r\n\r\n"
    many = b"--b\r\n" + b"X: y\r\n" * 100 + b"\r\n"
    parts = b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n'
    for body in (long, many, b"".join(parts % n for n in range(99)) + b"--b--\r\n"):
        with pytest.raises(DiptychError) as caught:
            await read([body])
        assert from_error(caught.value).status == 400


async def test_a_boundary_without_end_is_told() -> None:
    with pytest.raises(InvalidRequest, match="Boundary length 3000 exceeds maximum"):
        await read([GOOD], b"multipart/form-data; boundary=" + b"b" * 3000)
