"""Keys and limits on real processes: two gateways, keys by the command line, stock clients."""

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from websockets.asyncio.client import connect

from diptych_testkit.live_stack import MODEL, LiveStack, free_port

pytestmark = pytest.mark.live

COUNTS_WITHIN_S = 60.0
"""A change of a key, at every gateway."""
COMPUTED = re.compile(r"^\S*prompt_tokens_total{[^}]*} (\S+)$", re.MULTILINE)
PROMPT = "The lighthouse keeper climbs the stairs every night and tells the sea a story. " * 20


class Keyed:
    """A stack with two gateways and the command line."""

    def __init__(self, live: LiveStack, second_port: int) -> None:
        self.live = live
        self.urls = (live.base_url, f"http://127.0.0.1:{second_port}/v1")

    def diptych(self, *arguments: str) -> Any:
        """What a command prints, as JSON; raises if it fails."""
        command = (sys.executable, "-m", "diptych_cli", *arguments, *self.live.where)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    def logs(self) -> list[str]:
        """What every process has logged."""
        return [process.log.read_text(errors="replace") for process in self.live.processes]

    async def key(self, *options: str) -> tuple[str, str]:
        """A new key that both gateways know: itself and its id."""
        made = await asyncio.to_thread(self.diptych, "keys", "create", "--json", *options)
        for url in self.urls:
            await until(lambda url=url: status(url, made["key"]) == 200)
        return str(made["key"]), str(made["id"])


def status(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


async def until(condition: Any, timeout_s: float = COUNTS_WITHIN_S) -> None:
    began_s = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began_s < timeout_s
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    live = LiveStack(tmp_path_factory.mktemp("keyed"), patient=True)
    try:
        live.start_all()
        port = free_port()
        live.start("gateway", PORT=str(port)).wait_ready()
        yield Keyed(live, port)
    finally:
        live.close()


@pytest.fixture
async def clients() -> AsyncIterator[Any]:
    made: list[openai.AsyncOpenAI] = []

    def client(url: str, key: str, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 60, **options}
        made.append(openai.AsyncOpenAI(base_url=url, api_key=key, **options))
        return made[-1]

    yield client
    for one in made:
        await one.close()


async def chat(client: openai.AsyncOpenAI, text: str = "Hello", **options: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        **{"max_tokens": 8, "temperature": 0, **options},
    )


async def test_a_key_lets_in_at_both_gateways_and_stops_once_it_is_revoked(
    keyed: Keyed, clients: Any
) -> None:
    key, key_id = await keyed.key("--tenant", "acme")
    for url in keyed.urls:
        assert (await chat(clients(url, key))).choices[0].message.content
        for wrong in ("none", "dk-" + "x" * 43):
            with pytest.raises(openai.AuthenticationError) as refusal:
                await chat(clients(url, wrong))
            assert refusal.value.code == "invalid_api_key"
    keyed.diptych("keys", "revoke", key_id)
    for url in keyed.urls:
        await until(lambda url=url: status(url, key) == 401)


async def test_a_stock_client_is_told_when_its_limit_is_reached(keyed: Keyed, clients: Any) -> None:
    key, _ = await keyed.key("--tenant", "acme", "--requests-per-minute", "2")
    client = clients(keyed.urls[0], key)
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    await chat(client)
    with pytest.raises(openai.RateLimitError) as refusal:
        await chat(client)
    assert refusal.value.code == "rate_limit_exceeded"
    assert 1 <= int(refusal.value.response.headers["retry-after"]) <= 30
    assert refusal.value.response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_two_gateways_give_one_limit_together(keyed: Keyed, clients: Any) -> None:
    key, _ = await keyed.key("--tenant", "many", "--requests-per-minute", "30")
    began_s = time.monotonic()

    async def some(url: str) -> int:
        client = clients(url, key)
        outcomes = await asyncio.gather(
            *(chat(client, max_tokens=1) for _ in range(40)), return_exceptions=True
        )
        wrong = [
            o
            for o in outcomes
            if isinstance(o, BaseException) and not isinstance(o, openai.RateLimitError)
        ]
        assert not wrong, wrong[:1]
        return sum(not isinstance(outcome, BaseException) for outcome in outcomes)

    answered = sum(await asyncio.gather(*map(some, keyed.urls)))
    refilled = (time.monotonic() - began_s) * 30 / 60
    assert 30 <= answered <= 30 + refilled


async def test_a_socket_by_header_and_by_subprotocol(keyed: Keyed, clients: Any) -> None:
    key, _ = await keyed.key("--tenant", "acme")
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 8}
    async with clients(keyed.urls[1], key).responses.connect() as connection:
        await connection.response.create(**asked)
        async for event in connection:
            if event.type in ("response.completed", "response.incomplete"):
                break
    url = keyed.urls[0].replace("http", "ws") + "/responses"
    offers = ["diptych", f"diptych-api-key.{key}"]
    async with connect(url, subprotocols=offers) as socket, asyncio.timeout(60):
        assert socket.subprotocol == "diptych"
        await socket.send(json.dumps({"type": "response.create", **asked}))
        while json.loads(await socket.recv())["type"] not in (
            "response.completed",
            "response.incomplete",
        ):
            pass


async def costing(keyed: Keyed, client: Any) -> tuple[Any, int]:
    """An answer to the long prompt, and how many prompt tokens engines have computed for it."""

    def computed() -> int:
        pages = [p.page("/metrics").decode() for p in keyed.live.processes]
        return sum(int(float(n)) for page in pages for n in COMPUTED.findall(page))

    before = await asyncio.to_thread(computed)
    answer = await chat(client, PROMPT)
    after = await asyncio.to_thread(computed)
    return answer, after - before


async def test_tenants_share_neither_responses_nor_cached_prompts(
    keyed: Keyed, clients: Any
) -> None:
    mine, _ = await keyed.key("--tenant", "mine")
    theirs, _ = await keyed.key("--tenant", "theirs")
    me, they = clients(keyed.urls[0], mine), clients(keyed.urls[0], theirs)
    first, work = await costing(keyed, me)
    again, less = await costing(keyed, me)
    others, theirs_work = await costing(keyed, they)
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (first, again, others)]
    assert cached[1] > 100
    assert (cached[0], cached[2]) == (0, 0)
    assert theirs_work == work == first.usage.prompt_tokens
    assert less == work - cached[1]
    stored = await me.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    for attempt in (
        they.responses.retrieve(stored.id),
        they.responses.delete(stored.id),
        they.responses.cancel(stored.id),
        clients(keyed.urls[1], theirs).responses.retrieve(stored.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert (await clients(keyed.urls[1], mine).responses.retrieve(stored.id)).id == stored.id


async def test_what_was_used_is_in_the_books_once(keyed: Keyed, clients: Any) -> None:
    key, _ = await keyed.key("--tenant", "metered")
    usages = [(await chat(clients(url, key))).usage for url in keyed.urls for _ in range(3)]

    def books() -> Any:
        return keyed.diptych("usage", "--tenant", "metered", "--json")

    await until(lambda: sum(d["requests"] for d in books()) >= 6, timeout_s=60)
    await asyncio.sleep(5)  # both gateways have summed since
    days = books()
    assert sum(day["requests"] for day in days) == 6
    assert sum(day["prompt_tokens"] for day in days) == sum(u.prompt_tokens for u in usages)
    assert sum(day["answer_tokens"] for day in days) == sum(u.completion_tokens for u in usages)
    assert sum(day["kv_token_s"] for day in days) > 0
    assert sum(day["decode_j"] for day in days) == pytest.approx(
        sum(u.diptych["joules"]["decode"] for u in usages)
    )


async def test_a_gateway_for_the_network_does_not_start_without_a_key(own_stack: LiveStack) -> None:
    gateway = own_stack.start("gateway", HOST="0.0.0.0")
    assert await asyncio.to_thread(gateway.popen.wait, 120) == 2
    assert "diptych keys create" in gateway.last_words()


async def test_no_key_stands_in_any_log(keyed: Keyed, clients: Any) -> None:
    key, _ = await keyed.key()
    await chat(clients(keyed.urls[0], key))
    logs = keyed.logs()
    assert any("keys_changed" in text for text in logs)
    assert not any(key in text or key[10:] in text for text in logs)
