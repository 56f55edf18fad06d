"""The lines of a batch: read from its input file, checked, and written to its output files."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from diptych_contracts.batches import MAX_LINE_ERRORS, LineFault
from diptych_contracts.errors import InvalidRequest
from diptych_gateway.judging.bodies import decode_as

MAX_CUSTOM_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


class InputLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class _Model(msgspec.Struct):
    model: str = ""


_decoder = msgspec.json.Decoder(InputLine)
_model_decoder = msgspec.json.Decoder(_Model)
_encode = msgspec.json.Encoder().encode

Check = Callable[[bytes], None]
"""Raises `InvalidRequest` for a body that its endpoint would refuse."""


class TooLong(Exception):
    """A line exceeds the limit. `args` are its number."""


async def lines(
    content: AsyncIterator[bytes], *, max_bytes: int
) -> AsyncGenerator[tuple[int, bytes], None]:
    """The lines of a file that are not blank, with their numbers from 1.

    Raises:
        TooLong: one has more than `max_bytes`.
    """
    number, rest = 0, b""
    async for part in content:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            number += 1
            if len(line) > max_bytes:
                raise TooLong(number)
            if kept := _bare(number, line):
                yield number, kept
        if len(rest) > max_bytes:
            raise TooLong(number + 1)
    if kept := _bare(number + 1, rest):
        yield number + 1, kept


def _bare(number: int, line: bytes) -> bytes:
    return (line.removeprefix(_BOM) if number == 1 else line).strip()


def decode_line(data: bytes) -> InputLine:
    """A line of an input file. Raises `InvalidRequest`."""
    return decode_as(_decoder, data)


def named_model(line: InputLine) -> str:
    """The model that an inspected line asks for."""
    return _model_decoder.decode(line.body).model


@dataclass(slots=True)
class Inspection:
    """Looks at every line of an input file before any is run.

    Args:
        url: The endpoint that each must name.
        check: Judges bodies.
        max_lines: How many there may be.
    """

    url: str
    check: Check
    max_lines: int
    faults: list[LineFault] = field(default_factory=list)
    total: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def inspect(self, some: Iterable[tuple[int, bytes]]) -> None:
        """Look at some lines; CPU work, for an executor."""
        for number, data in some:
            self.total += 1
            if self.total > self.max_lines:
                self.fault("too_many_lines", f"expected at most {self.max_lines} requests", number)
                return
            try:
                self._one(decode_line(data))
            except InvalidRequest as err:
                self.fault(err.code or "invalid_value", str(err), number, err.param)

    @property
    def hopeless(self) -> bool:
        """Whether enough was seen."""
        return len(self.faults) >= MAX_LINE_ERRORS or self.total > self.max_lines

    def fault(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        """Note what is wrong."""
        if len(self.faults) < MAX_LINE_ERRORS:
            self.faults.append(LineFault(code=code, message=message, param=param, line=line))

    def _one(self, line: InputLine) -> None:
        if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
            text = f"'custom_id': expected 1 to {MAX_CUSTOM_ID_CHARS} characters"
            raise InvalidRequest(text, param="custom_id")
        digest = sha256(line.custom_id.encode("utf-8", "surrogatepass")).digest()[:16]
        if digest in self._seen:
            text = f"'custom_id': {line.custom_id[:80]!r} was used before"
            raise InvalidRequest(text, param="custom_id", code="duplicate_custom_id")
        self._seen.add(digest)
        if line.method != "POST":
            raise InvalidRequest(
                f"'method': expected 'POST', saw {line.method[:40]!r}", param="method"
            )
        if line.url != self.url:
            text = f"'url': expected the batch's endpoint '{self.url}', saw {line.url[:80]!r}"
            raise InvalidRequest(text, param="url", code="mismatched_endpoint")
        self.check(bytes(line.body))


def answered(custom_id: str, *, line_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line that was run, as it stands in the output or error file."""
    response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))
    return _encode(OutputLine(id=line_id, custom_id=custom_id, response=response, error=None))


def unanswered(custom_id: str, *, line_id: str, code: str, message: str) -> bytes:
    """A line that was not run, as it stands in the error file."""
    error = LineError(code=code, message=message)
    return _encode(OutputLine(id=line_id, custom_id=custom_id, response=None, error=error))
