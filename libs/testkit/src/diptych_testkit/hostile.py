"""Requests and frames of ill will: what is valid, bent in one or a few places, from one seed.

Three layers, each inside one that is intact: the JSON of a body or frame (`hostile_json`), the head
of an HTTP request, the bytes on the wire. What is drawn follows from the seed and the count of
drawings alone.
"""

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from diptych_testkit.hostile_json import HostileJson

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
POSTED = (
    *(CHAT, CHAT, CHAT, RESPONSES, RESPONSES, RESPONSES, "/v1/completions", "/v1/embeddings"),
    *("/tokenize", "/detokenize", "/v1/batches", "/v1/files"),
)
GOTTEN = (
    "/v1/models",
    "/v1/models/{}",
    "/v1/responses/{}",
    "/v1/responses/{}/input_items",
    "/v1/chat/completions/{}",
    "/v1/batches/{}",
    "/v1/files/{}/content",
    "/health/live",
    "/openapi.json",
    "/{}",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
_BENT_HANDSHAKE = (
    (b"connection", b"close"),
    (b"upgrade", b"h2c"),
    (b"sec-websocket-version", b"7"),
    (b"sec-websocket-key", b"short"),
    (b"sec-websocket-key", b"\xff\xff"),
    (b"sec-websocket-protocol", b"a," * 100),
    (b"sec-websocket-extensions", b"permessage-deflate; nonsense=\xff"),
    (b"origin", b"null"),
    (b"x-diptych-resume", b"perhaps"),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request to be sent as it is."""

    raw: bytes
    method: str
    whole: bool
    """Whether HTTP itself is intact: then it has an answer, and the connection may go on."""


class Hostility:
    """Draws requests and frames.

    Args:
        seed: Everything follows from it.
        model: A model that is served, so that some of it gets through.
    """

    def __init__(self, seed: str, model: str) -> None:
        self._rng = Random(seed)
        self._json = HostileJson(self._rng, model)

    # HTTP

    def request(self) -> Sent:
        """A request; most are HTTP as it should be."""
        kind = self._rng.random()
        if kind < 0.62:
            return self._posted([])
        if kind < 0.74:
            return self._posted(self._headers())
        if kind < 0.84:
            return self._gotten()
        if kind < 0.9:
            return self._wrong_method()
        return self._broken()

    def _posted(self, headers: list[bytes]) -> Sent:
        path = self._rng.choice(POSTED)
        valid = self._json.response() if path == RESPONSES else self._json.chat()
        return _request("POST", path, self._json.body(valid), headers)

    def _headers(self) -> list[bytes]:
        rng = self._rng
        weird = rng.choice((b"", b"\xff\xfe", b"x" * 3000, b"-1", b"0", b"a:b", b"1, 2", b"true"))
        names = (
            b"content-type",
            b"content-encoding",
            b"x-diptych-resume",
            b"last-event-id",
            b"authorization",
            b"idempotency-key",
            b"traceparent",
            b"accept",
            b"origin",
            b"x-request-id",
            b"cookie",
            b"expect",
            b"range",
        )
        known = (
            b"content-type: text/html",
            b"content-type: application/json; charset=utf-16",
            b"content-encoding: gzip",
            b"authorization: Bearer " + b"k" * 500,
            b"traceparent: 00-" + b"z" * 32 + b"-1-1",
            b"last-event-id: " + b"0" * 32 + b":99999999999999999999",
            b"expect: 100-continue",
            b"connection: upgrade, HTTP2-Settings",
        )
        drawn = [rng.choice(names) + b": " + weird, rng.choice(known)]
        return drawn[: rng.choice((1, 2))]

    def _gotten(self) -> Sent:
        rng = self._rng
        words = ("nobody", "%00", "%ff", "..%2f..", "a" * 3000, "resp_" + "0" * 32, "é", "a/b/c")
        path = rng.choice(GOTTEN).format(rng.choice(words)).encode("latin-1")
        queries = (
            b"?stream=true&starting_after=-1",
            b"?stream=maybe",
            b"?starting_after=99999999999999999999&stream=true",
            b"?stream=true&stream=false",
            b"?%ff=%fe&&&=",
            b"?limit=-5&order=sideways&after=%00",
            b"?" + b"a=b&" * 500,
        )
        return _request("GET", path + rng.choice((b"", rng.choice(queries))), b"", [])

    def _wrong_method(self) -> Sent:
        path = self._rng.choice((*POSTED, *GOTTEN)).format("nobody")
        return _request(self._rng.choice(METHODS), path, self._json.body(self._json.chat()), [])

    def _broken(self) -> Sent:
        """A request whose very HTTP is bent."""
        rng = self._rng
        raw = self._posted([]).raw
        at = rng.randrange(1, len(raw))
        head, _, rest = raw.partition(b"\r\n\r\n")
        choices: tuple[Callable[[], bytes], ...] = (
            lambda: raw[:at],
            lambda: raw[at:],
            lambda: raw[: at % len(head)] + rng.randbytes(4) + raw[at % len(head) :],
            lambda: rng.randbytes(rng.randrange(1, 400)),
            lambda: raw.replace(b"HTTP/1.1", rng.choice((b"HTTP/9.9", b"HTTP/2.0", b"HTCPCP/1.0"))),
            lambda: raw.replace(b"\r\n", b"\n"),
            lambda: raw.replace(b"content-length: ", b"content-length: -"),
            lambda: raw.replace(b"content-length: ", b"content-length: 99999999999999999999"),
            lambda: raw.replace(b"content-length", b"content-length: 3\r\ncontent-length"),
            lambda: _chunked(head, b"zz\r\n" + rest),
            lambda: _chunked(head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest) + 7, rest)),
            lambda: _chunked(head, b"1;" + b"x" * 70_000 + b"\r\n{\r\n0\r\n\r\n"),
            lambda: head + b"\r\nx: " + b"y" * 80_000 + b"\r\n\r\n" + rest,
            lambda: head + b"\r\nx: y" * 150 + b"\r\n\r\n" + rest,
            lambda: b"CONNECT nobody:443 HTTP/1.1\r\nhost: x\r\n\r\n",
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
            lambda: raw * 20,
        )
        return Sent(rng.choice(choices)(), "POST", whole=False)

    # WebSockets

    def frame(self) -> str | bytes:
        """A message for the Responses socket; bytes are to go out as a binary one."""
        asked = {"type": "response.create", **self._json.response()}
        asked.pop("stream", None)
        if self._rng.random() < 0.2:
            asked["stream_id"] = self._rng.choice(("a", "b", "c"))
        if self._rng.random() < 0.1:
            asked["generate"] = False
        data = self._json.body(asked)
        if self._rng.random() < 0.05:
            return data
        return data.decode("utf-8", "replace")

    def handshake(self) -> bytes:
        """A request for a WebSocket, which may be bent."""
        rng = self._rng
        first = b"GET /v1/responses HTTP/1.1"
        fields = {
            b"host": b"x",
            b"connection": b"upgrade",
            b"upgrade": b"websocket",
            b"sec-websocket-version": b"13",
            b"sec-websocket-key": base64.b64encode(rng.randbytes(16)),
        }
        if rng.random() < 0.2:
            del fields[rng.choice(list(fields))]
        elif rng.random() < 0.4:
            name, value = rng.choice(_BENT_HANDSHAKE)
            fields[name] = value
        elif rng.random() < 0.2:
            method = rng.choice((b"POST /v1/responses", b"GET /v1/nowhere", b"GET /v1/models"))
            first = method + rng.choice((b" HTTP/1.1", b" HTTP/1.0"))
        lines = [name + b": " + value for name, value in fields.items()]
        return b"\r\n".join([first, *lines]) + b"\r\n\r\n"

    def wire(self) -> bytes:
        """Bytes on a WebSocket that is open, few of which are frames as they should be."""
        rng = self._rng
        text = self._json.body({"type": "response.create", **self._json.response()})
        choices: tuple[Callable[[], bytes], ...] = (
            lambda: _frame(1, text, masked=False),
            lambda: _frame(1, b"\xff\xfe" + text),
            lambda: _frame(rng.choice((3, 7, 11, 15)), text),
            lambda: _frame(1, text, reserved=rng.choice((1, 2, 4, 7))),
            lambda: _frame(9, b"p" * 126),
            lambda: _frame(9, b"ping") * 50,
            lambda: _frame(9, b"ping", final=False),
            lambda: _frame(0, text),
            lambda: _frame(1, text, final=False) * 2,
            lambda: _frame(1, b"", final=False) + _frame(0, b"", final=False) * 1100,
            lambda: b"\x81\xff" + struct.pack(">Q", 2**63) + b"mask" + text,
            lambda: b"\x81\xff" + struct.pack(">Q", 9 * 1024 * 1024) + b"mask" + text,
            lambda: _frame(8, struct.pack(">H", rng.choice((0, 999, 1004, 1005, 1015, 65535)))),
            lambda: _frame(8, b"\x03"),
            lambda: _frame(8, struct.pack(">H", 1000) + b"\xff\xfe"),
            lambda: _frame(8, struct.pack(">H", 1000) + b"x" * 200),
            lambda: _frame(2, text),
            lambda: rng.randbytes(rng.randrange(1, 300)),
            lambda: _frame(1, text)[: rng.randrange(1, 20)],
        )
        return b"".join(rng.choice(choices)() for _ in range(rng.choice((1, 1, 2))))


def _request(method: str, path: str | bytes, body: bytes, headers: list[bytes]) -> Sent:
    target = path if isinstance(path, bytes) else path.encode()
    lines = [f"{method} ".encode() + target + b" HTTP/1.1", b"host: x"]
    if not any(header.startswith(b"content-type") for header in headers):
        lines.append(b"content-type: application/json")
    lines += [*headers, b"content-length: %d" % len(body)]
    return Sent(b"\r\n".join(lines) + b"\r\n\r\n" + body, method, whole=True)


def _chunked(head: bytes, body: bytes) -> bytes:
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
    return b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n" + body


def _frame(
    opcode: int, data: bytes, *, final: bool = True, masked: bool = True, reserved: int = 0
) -> bytes:
    first = (0x80 if final else 0) | reserved << 4 | opcode
    size = len(data)
    if size < 126:
        length = bytes([masked << 7 | size])
    elif size < 1 << 16:
        length = bytes([masked << 7 | 126]) + struct.pack(">H", size)
    else:
        length = bytes([masked << 7 | 127]) + struct.pack(">Q", size)
    # A mask of zeros leaves the data as it is.
    return bytes([first]) + length + (bytes(4) if masked else b"") + data
