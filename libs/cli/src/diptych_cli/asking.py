"""An OpenAI-compatible server, asked with nothing but the standard library."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from diptych_cli.failing import CliError

_CONNECT_S = 10.0
_SILENCE_S = 300.0


Body = bytes | Iterator[bytes] | None


class Refusal(msgspec.Struct):
    error: dict[str, Any] | str = ""

    @property
    def message(self) -> str:
        return self.error if isinstance(self.error, str) else str(self.error.get("message", ""))


class Listed(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Listed] = []


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is, and the key it wants."""

    base_url: str
    api_key: str = ""

    def models(self) -> list[str]:
        """The ids of what it serves.

        Raises:
            CliError: it cannot be reached, or speaks something else.
        """
        with self._asked("GET", "/models") as answer:
            try:
                return [model.id for model in msgspec.json.decode(answer.read(), type=Models).data]
            except msgspec.DecodeError as err:
                raise CliError(f"{self.base_url} speaks no OpenAI: {err}") from err

    @contextmanager
    def chat(self, body: dict[str, Any]) -> Iterator[Iterator[bytes]]:
        """The lines of a streamed answer; leaving the `with` early ends it.

        Raises:
            CliError: the server cannot be reached, or refuses.
        """
        with self._asked("POST", "/chat/completions", msgspec.json.encode(body)) as answer:
            yield self._lines(answer)

    @contextmanager
    def asked(
        self, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to any request that succeeds.

        Raises:
            CliError: the server cannot be reached, or refuses.
        """
        with self._asked(method, path, body, headers) as answer:
            yield answer

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            while line := answer.readline():
                yield line
        except (OSError, http.client.HTTPException) as err:
            raise CliError(f"{self.base_url} fell silent: {_reason(err)}") from err

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection, root = self._connection()
        try:
            answer = self._sent(connection, method, root + path, body, headers)
            if answer.status != http.client.OK:
                raise CliError(_refusal(answer.status, answer.read()) + self._advice(answer.status))
            yield answer
        finally:
            connection.close()

    def _sent(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Body,
        more: Mapping[str, str] | None,
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body else {}
        headers |= more or {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.connect()
            connection.sock.settimeout(_SILENCE_S)
            connection.request(method, path, body, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as err:
            raise CliError(f"{self.base_url} does not answer: {_reason(err)}") from err

    def _advice(self, status: int) -> str:
        """Where a key goes, for who has given none."""
        if status != http.client.UNAUTHORIZED or self.api_key:
            return ""
        return "; put it into DIPTYCH_API_KEY (with --url: OPENAI_API_KEY)"

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError as err:
            raise CliError(f"{self.base_url} is no URL: {err}") from err
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise CliError(f"expected a URL like http://127.0.0.1:8080/v1, got {self.base_url!r}")
        connection = kinds[parts.scheme](parts.hostname, port, timeout=_CONNECT_S)
        return connection, parts.path.rstrip("/")


def _refusal(status: int, body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=Refusal).message
    except msgspec.DecodeError:
        message = ""
    return message or f"the server refuses with status {status}"


def _reason(err: Exception) -> str:
    return getattr(err, "strerror", None) or str(err) or type(err).__name__
