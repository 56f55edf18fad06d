"""Pages of other sites: off by default, allowed by a list."""

from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect

SITE = "https://chat.example"
PREFLIGHT = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
CHAT = "/v1/chat/completions"


async def test_nobody_is_allowed_by_default(stack: Any) -> None:
    asked = await stack.client.options(CHAT, headers=PREFLIGHT)
    assert asked.status_code == 405
    answer = await stack.client.get("/v1/models", headers={"origin": SITE})
    assert answer.status_code == 200
    for response in (asked, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_who_is_listed_may_ask_and_read(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, cors_origins=(f"{SITE}/", "https://other.example")) as stack:
        asked = await stack.client.options(CHAT, headers=PREFLIGHT)
        assert (asked.status_code, asked.content) == (204, b"")
        assert asked.headers["access-control-allow-origin"] == SITE
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        assert asked.headers["vary"] == "origin"
        assert len(asked.headers["x-request-id"]) == 32
        sent = {"origin": SITE}
        answer = await stack.client.post(CHAT, json=stack.body(), headers=sent)
        refused = await stack.client.post(CHAT, json={}, headers=sent)
        assert (answer.status_code, refused.status_code) == (200, 400)
        for response in (answer, refused):
            assert response.headers["access-control-allow-origin"] == SITE
            assert "retry-after" in response.headers["access-control-expose-headers"]
        stranger = await stack.client.options(
            CHAT, headers={**PREFLIGHT, "origin": "https://evil.example"}
        )
        assert stranger.status_code == 405
        assert "access-control-allow-origin" not in stranger.headers


async def test_everybody_may_where_it_says_so(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, cors_origins=("*",)) as stack:
        asked = await stack.client.options(CHAT, headers={**PREFLIGHT, "origin": "null"})
        assert asked.headers["access-control-allow-origin"] == "null"


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
async def test_a_strange_page_opens_no_websocket(run_stack: Any, hello: Any, path: str) -> None:
    async with run_stack(hello, cors_origins=(SITE,)) as stack:
        url = stack.base_url.replace("http", "ws") + f"/{path}"
        own = stack.base_url.removesuffix("/v1")
        for strange in ("https://evil.example", f"{own}.evil", own.replace("://", "://evil")):
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with connect(url, origin=strange):
                    pass
            assert refused.value.response.status_code == 403
            assert b"origin_not_allowed" in refused.value.response.body
        for origin in (SITE, own, None):
            async with connect(url, origin=origin):
                pass


async def test_a_strange_page_sends_no_body_unasked(stack: Any) -> None:
    """A body without a type is the one kind that browsers send to other sites unasked."""
    sent = {"origin": "https://evil.example"}
    response = await stack.client.post(CHAT, content=b"{}", headers=sent)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert len(response.headers["x-request-id"]) == 32
    assert stack.fleet.requests == []
    typed = {**sent, "content-type": "text/plain"}
    assert (await stack.client.post(CHAT, content=b"{}", headers=typed)).status_code == 415
