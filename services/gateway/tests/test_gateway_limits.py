"""Rate limits over HTTP and WebSocket, at one gateway and at two that share them."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from diptych_bus.memory import MemoryBus
from diptych_bus.memory.stream import EPOCH_UNIX_MS
from diptych_contracts.allowances import Allowance
from diptych_contracts.journal import EndReason
from diptych_contracts.keys import RateLimits
from diptych_contracts.streams import ALLOWANCES, REQUESTS
from diptych_gateway.tenancy.allowances import duration
from diptych_testkit.keys import bearer, put_key, put_tenant

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def nothing_refills(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bus's clock: a busy machine's seconds would bring some of a limit back."""
    monkeypatch.setattr(MemoryBus, "unix_ms", lambda _: EPOCH_UNIX_MS)


async def limited(stack: Any, tenant: RateLimits | None = None, **limits: int) -> dict[str, str]:
    """The headers of a key with limits that the gateway knows."""
    if tenant is not None:
        await put_tenant(stack.fleet.bus, "acme", tenant)
    key = await put_key(stack.fleet.bus, "k1", tenant="acme", limits=RateLimits(**limits))
    await stack.until(lambda: listed(stack.client, key))
    return bearer(key)


async def listed(client: httpx.AsyncClient, key: str) -> bool:
    return bool((await client.get("/v1/models", headers=bearer(key))).status_code == 200)


async def ask(stack: Any, headers: dict[str, str], **changes: Any) -> httpx.Response:
    answer: httpx.Response = await stack.client.post(
        CHAT, json=stack.body(**changes), headers=headers
    )
    return answer


async def test_requests_per_minute(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=3)
    answers = [await ask(stack, headers) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    told = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert told == ["2", "1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    refusal = answers[-1]
    error = refusal.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "3 requests per minute" in error["message"]
    assert 1 <= int(refusal.headers["retry-after"]) <= 20
    assert refusal.headers["x-ratelimit-reset-requests"].startswith(("1m0s", "5", "4", "3"))
    assert len(stack.fleet.requests) == 3


async def test_models_and_retrievals_take_nothing(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=1)
    made = await stack.client.post("/v1/responses", json=stack.asked(), headers=headers)
    assert made.status_code == 200
    for _ in range(3):
        path = f"/v1/responses/{made.json()['id']}"
        assert (await stack.client.get(path, headers=headers)).status_code == 200
        assert (await stack.client.get("/v1/models", headers=headers)).status_code == 200
    again = await stack.client.post("/v1/responses", json=stack.asked(), headers=headers)
    assert again.status_code == 429


async def test_a_request_that_is_wrong_takes_nothing(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=1)
    assert (await ask(stack, headers, model="nope")).status_code == 404
    assert (await ask(stack, headers, max_tokens=99999)).status_code == 400
    assert (await ask(stack, headers)).status_code == 200


async def test_a_request_that_is_not_stored_takes_nothing(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=1)
    stream = stack.broker.streams[REQUESTS.name]
    spec, stream.spec = stream.spec, replace(stream.spec, max_bytes=10)
    refusal = await ask(stack, headers)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "storage_full")
    stream.spec = spec
    assert (await ask(stack, headers)).status_code == 200


async def test_tokens_are_reserved_and_what_was_not_used_comes_back(stack: Any) -> None:
    headers = await limited(stack, tokens_per_minute=1000)
    first = await ask(stack, headers, max_tokens=900)
    used = first.json()["usage"]["total_tokens"]
    assert used < 100
    second = await ask(stack, headers, max_tokens=900)
    assert second.status_code == 200
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert left <= 1000 - used - 900
    third = await ask(stack, headers, max_tokens=900)
    assert third.status_code == 200  # what the second did not use is there again
    spent = 3 * used
    now = int((await ask(stack, headers, max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
    assert 1000 - spent - 20 <= now + 40 <= 1000


async def test_a_request_larger_than_the_limit_is_told_that_it_never_fits(stack: Any) -> None:
    headers = await limited(stack, tokens_per_minute=100)
    answer = await ask(stack, headers, max_tokens=500)
    assert answer.status_code == 429
    assert "100 tokens per minute" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert (await ask(stack, headers, max_tokens=50)).status_code == 200


class Held:
    """Answers that wait until they are let through."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        ids = fleet.ids("Hello world")
        fleet.say(request, ids[:1])
        await self.open.wait()
        fleet.say(request, ids[1:], index=1, end=EndReason.STOP)


async def test_requests_at_once(run_stack: Any) -> None:
    held = Held()
    async with run_stack(held) as stack:
        headers = await limited(stack, concurrency=2)
        running = [asyncio.create_task(ask(stack, headers)) for _ in range(2)]
        await stack.until(lambda: len(stack.fleet.requests) == 2)
        third = await ask(stack, headers)
        assert third.status_code == 429
        assert "2 requests at once" in third.json()["error"]["message"]
        assert third.headers["retry-after"] == "1"
        held.open.set()
        assert [(await task).status_code for task in running] == [200, 200]
        await stack.until(lambda: served(stack, headers))


async def served(stack: Any, headers: dict[str, str]) -> bool:
    return bool((await ask(stack, headers)).status_code == 200)


async def test_each_choice_takes_a_place_and_too_many_are_told_so(stack: Any) -> None:
    headers = await limited(stack, concurrency=2, requests_per_minute=10)
    several = await ask(stack, headers, n=2)
    assert several.status_code == 200, several.text
    assert several.headers["x-ratelimit-remaining-requests"] == "8"
    too_many = await ask(stack, headers, n=3)
    assert too_many.status_code == 429
    assert too_many.headers["x-should-retry"] == "false"
    assert len(stack.fleet.requests) == 2


async def test_a_background_answer_keeps_its_place_until_it_ends(run_stack: Any) -> None:
    held = Held()
    async with run_stack(held) as stack:
        headers = await limited(stack, concurrency=1, tokens_per_minute=5000)
        body = stack.asked(background=True, max_output_tokens=500)
        made = await stack.client.post("/v1/responses", json=body, headers=headers)
        assert made.json()["status"] == "in_progress"
        assert (await ask(stack, headers, max_tokens=5)).status_code == 429
        held.open.set()
        await stack.until(lambda: served(stack, headers))
        told = await ask(stack, headers, max_tokens=5)
        assert int(told.headers["x-ratelimit-remaining-tokens"]) > 4500


async def test_the_limits_of_a_tenant_hold_for_all_its_keys(stack: Any) -> None:
    first = await limited(stack, RateLimits(requests_per_minute=2), requests_per_minute=100)
    second = bearer(await put_key(stack.fleet.bus, "k2", tenant="acme"))
    other = bearer(await put_key(stack.fleet.bus, "k3", tenant="rival"))
    await stack.until(lambda: listed(stack.client, other["Authorization"].split()[1]))
    assert (await ask(stack, first)).headers["x-ratelimit-limit-requests"] == "2"
    assert (await ask(stack, second)).status_code == 200
    refused = await ask(stack, first)
    assert refused.status_code == 429
    assert "this tenant may make 2 requests" in refused.json()["error"]["message"]
    free = await ask(stack, other)
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def test_what_a_tenant_may_not_is_not_taken_from_its_key(stack: Any) -> None:
    headers = await limited(stack, RateLimits(requests_per_minute=1), tokens_per_minute=1000)
    assert (await ask(stack, headers, max_tokens=5)).status_code == 200
    share = stack.gateway.allowances._shares["key.k1"]
    await stack.until(lambda: not share.running)
    assert (await ask(stack, headers, max_tokens=5)).status_code == 429
    assert share.running == 0


async def test_a_changed_limit_counts_without_a_restart(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=1)
    assert (await ask(stack, headers)).status_code == 200
    assert (await ask(stack, headers)).status_code == 429
    await put_key(stack.fleet.bus, "k1", tenant="acme", limits=RateLimits())
    await stack.until(lambda: served(stack, headers))


async def test_a_turn_on_a_socket_gets_an_error_frame(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=1)
    url = stack.base_url.replace("http", "ws") + "/responses"
    frame = json.dumps({"type": "response.create", "model": "tiny", "input": "Hello"})
    async with connect(url, additional_headers=headers) as socket, asyncio.timeout(60):
        await socket.send(frame)
        while json.loads(await socket.recv())["type"] != "response.completed":
            pass
        await socket.send(frame)
        event = json.loads(await socket.recv())
    assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(event["error"]["headers"]["retry-after"]) <= 60


async def test_two_gateways_share_one_limit(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=20, tokens_per_minute=10**6)
    async with stack.another("gateway-00000000dddd") as client:
        await stack.until(lambda: listed(client, headers["Authorization"].split()[1]))

        async def some(client: httpx.AsyncClient) -> Counter[int]:
            asking = (client.post(CHAT, json=stack.body(), headers=headers) for _ in range(25))
            return Counter(answer.status_code for answer in await asyncio.gather(*asking))

        one, two = await asyncio.gather(some(stack.client), some(client))
    assert set(one + two) == {200, 429}
    assert (one + two)[200] == 20
    assert len(stack.fleet.requests) == (one + two)[200]


async def test_a_sequential_client_of_two_gateways_has_its_one_place(stack: Any) -> None:
    headers = await limited(stack, concurrency=1)
    async with stack.another("gateway-00000000dddd") as client:
        await stack.until(lambda: listed(client, headers["Authorization"].split()[1]))
        for _ in range(5):
            for at in (stack.client, client):
                answer = await at.post(CHAT, json=stack.body(), headers=headers)
                assert answer.status_code == 200, answer.text


async def test_a_gateway_that_leaves_brings_its_share_back(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=100, concurrency=2)
    async with stack.another("gateway-00000000dddd") as client:
        await stack.until(lambda: listed(client, headers["Authorization"].split()[1]))
        asking = (client.post(CHAT, json=stack.body(), headers=headers) for _ in range(2))
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
    kept = await stack.fleet.bus.bucket(ALLOWANCES, Allowance).get("key.k1")
    assert kept.value.requests >= 98
    assert kept.value.places == ()


async def test_a_crowd_costs_few_writes(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=6000)
    revisions = []
    for _ in range(2):
        answers = await asyncio.gather(*(ask(stack, headers) for _ in range(60)))
        assert {answer.status_code for answer in answers} == {200}
        kept = await stack.fleet.bus.bucket(ALLOWANCES, Allowance).get("key.k1")
        revisions.append(kept.revision)
    assert revisions[-1] <= 20


async def test_while_the_bus_is_away_nothing_is_given_out_and_nothing_lost(stack: Any) -> None:
    headers = await limited(stack, requests_per_minute=2)
    assert (await ask(stack, headers)).status_code == 200
    stack.broker.go_away()
    away = await ask(stack, headers)
    assert (away.status_code, away.json()["error"]["code"]) == (503, "unavailable")
    stranger = await stack.client.get("/v1/models", headers=bearer("dk-stranger"))
    assert stranger.status_code == 401
    stack.broker.come_back()
    await stack.until(lambda: served(stack, headers))
    assert (await ask(stack, headers)).status_code == 429


async def test_without_limits_nothing_is_written(stack: Any) -> None:
    headers = await limited(stack)
    assert (await ask(stack, headers)).status_code == 200
    assert await stack.fleet.bus.bucket(ALLOWANCES, Allowance).get("key.k1") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0204, "20ms"), (1, "1s"), (1.54, "1.5s"), (59.97, "1m0s"), (360, "6m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
