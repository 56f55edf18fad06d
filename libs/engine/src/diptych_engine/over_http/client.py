"""One engine's HTTP server. Foreign exceptions become ours here, and nowhere else."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus

import httpx

from diptych_contracts.errors import EngineGone
from diptych_engine.over_http.addresses import http_url, key_header
from diptych_engine.over_http.events import event_data
from diptych_engine.over_http.refusals import refusal

CONNECT_S = 5.0
DRIP = 4
"""How many deadlines a whole answer may take that comes byte by byte, each one in time."""
_MAX_TEXT_BYTES = 64 * 1024
NOTHING: Mapping[str, str] = {}


class EngineHttp:
    """Asks one server. Used on one event loop.

    Args:
        url: Where it listens, `http://host:port`.
        api_key: Its key; empty: it has none.
        setting: Where the URL comes from.

    Raises:
        Permanent: URL or key can be none.
    """

    def __init__(self, url: str, *, api_key: str = "", setting: str = "engine_url") -> None:
        self.url = http_url(url, setting)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= key_header(api_key)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )

    async def get(self, path: str, *, within_s: float) -> bytes:
        """The body of an answer of 200. Raises as `refusal` says, and `EngineGone`."""
        return await self._whole("GET", path, None, NOTHING, within_s)

    async def post(
        self, path: str, body: bytes, *, within_s: float, headers: Mapping[str, str] = NOTHING
    ) -> bytes:
        """The body of an answer of 200; cancelling closes the connection. Raises as `get` does."""
        return await self._whole("POST", path, body, headers, within_s)

    async def status(self, method: str, path: str, body: bytes | None, *, within_s: float) -> int:
        """The status of an answer, whatever it is. Raises `EngineGone` if there is none."""
        return (await self._asked(method, path, body, NOTHING, within_s)).status_code

    async def _asked(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        within_s: float,
    ) -> httpx.Response:
        with_limits = httpx.Timeout(within_s, connect=min(CONNECT_S, within_s), pool=None)
        try:
            async with asyncio.timeout(DRIP * within_s):
                return await self._client.request(
                    method, path, content=body, headers=headers, timeout=with_limits
                )
        except TimeoutError as err:
            raise EngineGone(f"{self.url}: no whole answer in {DRIP * within_s} s") from err
        except httpx.HTTPError as err:
            raise self._gone(err) from err

    async def _whole(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        within_s: float,
    ) -> bytes:
        answer = await self._asked(method, path, body, headers, within_s)
        if answer.status_code != HTTPStatus.OK:
            raise refusal(answer.status_code, answer.content[:_MAX_TEXT_BYTES])
        return answer.content

    def events(
        self, path: str, body: bytes, *, silence_s: float, headers: Mapping[str, str] = NOTHING
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The events of a streamed answer; leaving the context closes the connection.

        Args:
            path: What is asked.
            body: JSON.
            silence_s: Longest time without a byte.
            headers: More of them.
        """
        return self._events(path, body, silence_s, headers)

    @asynccontextmanager
    async def _events(
        self, path: str, body: bytes, silence_s: float, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        limits = httpx.Timeout(silence_s, connect=CONNECT_S, pool=None)
        request = self._client.build_request(
            "POST", path, content=body, headers=headers, timeout=limits
        )
        try:
            answer = await self._client.send(request, stream=True)
            try:
                if answer.status_code != HTTPStatus.OK:
                    raise refusal(answer.status_code, await _beginning(answer))
                yield event_data(answer.aiter_raw())
            finally:
                await answer.aclose()
        except httpx.HTTPError as err:
            raise self._gone(err) from err

    def _gone(self, err: httpx.HTTPError) -> EngineGone:
        what = str(err) or type(err).__name__
        return EngineGone(f"{self.url}: {what}")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


async def _beginning(answer: httpx.Response) -> bytes:
    """What stands first in an answer, which need not end."""
    text = b""
    async for chunk in answer.aiter_raw():
        text += chunk
        if len(text) >= _MAX_TEXT_BYTES:
            break
    return text[:_MAX_TEXT_BYTES]
