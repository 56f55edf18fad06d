"""Who is let in, as what, and what one tenant may know of another: nothing."""

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect

from diptych_bus.memory import MemoryBroker
from diptych_contracts.errors import Permanent, Transient
from diptych_contracts.journal import EndReason
from diptych_contracts.keys import RateLimits, Role, key_entry
from diptych_gateway.doors.routes import needs
from diptych_gateway.errors import ApiError
from diptych_gateway.tenancy.callers import ANONYMOUS, Caller
from diptych_gateway.tenancy.identity import chosen_subprotocol
from diptych_gateway.tenancy.keyring import Keyring
from diptych_policy.access import Right
from diptych_testkit.keys import bearer, keys_bucket, put_key, put_tenant

CHAT = "/v1/chat/completions"
LONG_AGO_MS = 1000


async def chat(stack: Any, key: str | None, **changes: Any) -> httpx.Response:
    headers = bearer(key) if key is not None else {}
    body = stack.body(**changes)
    answer: httpx.Response = await stack.client.post(CHAT, json=body, headers=headers)
    return answer


async def heard() -> None:
    """Let the memory bus say everything."""
    for _ in range(50):
        await asyncio.sleep(0)


async def known(stack: Any, key: str) -> None:
    """Wait until the gateway has heard of a key."""
    await stack.until(lambda: status_of(stack, key))


async def status_of(stack: Any, key: str) -> bool:
    answer = await stack.client.get("/v1/models", headers=bearer(key))
    return bool(answer.status_code == 200)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["code"]


REFUSED = (401, "authentication_error", "invalid_api_key")


async def test_without_keys_anybody_on_this_machine_is_served(stack: Any) -> None:
    assert (await chat(stack, None)).status_code == 200
    assert (await chat(stack, "whatever")).status_code == 200
    assert stack.fleet.requests[0].tenant == "default"


async def test_a_key_counts_in_its_own_place_alone(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    bucket = keys_bucket(stack.fleet.bus)
    kept = await bucket.get(key_entry("k1"))
    await bucket.put(key_entry("k2"), kept.value)
    await bucket.delete(key_entry("k1"))
    await put_key(stack.fleet.bus, "k3")
    keyring = stack.gateway.keyring
    await stack.until(lambda: [entry.key_id for entry in keyring.entries] == ["k3"])
    with pytest.raises(ApiError):
        keyring.caller(key)


async def test_from_the_first_key_on_every_request_needs_one(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1", tenant="acme")
    await stack.until(lambda: not stack.gateway.keyring.open)
    missing, wrong = await chat(stack, None), await chat(stack, "dk-wrong-key")
    assert error_of(missing) == error_of(wrong) == REFUSED
    assert missing.headers["www-authenticate"] == "Bearer"
    assert "no API key was given" in missing.text
    assert "not one of this server's" in wrong.text
    assert "wrong-key" not in wrong.text
    assert (await chat(stack, key)).status_code == 200
    assert [request.tenant for request in stack.fleet.requests] == ["acme"]


@pytest.mark.parametrize(
    "header", ["", "Basic abc", "Bearer", "bearer", "dk-k1", "Bearer " + "x" * 600]
)
async def test_what_is_no_bearer_token_is_refused(stack: Any, header: str) -> None:
    await put_key(stack.fleet.bus, "k1")
    await stack.until(lambda: not stack.gateway.keyring.open)
    answer = await stack.client.get("/v1/models", headers={"Authorization": header})
    assert error_of(answer) == REFUSED


async def test_two_keys_at_once_are_refused(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    await known(stack, key)
    headers = [("Authorization", f"Bearer {key}")] * 2
    assert error_of(await stack.client.get("/v1/models", headers=headers)) == REFUSED


async def test_a_key_never_counts_in_a_query(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    await known(stack, key)
    for name in ("api_key", "key", "token", "access_token"):
        answer = await stack.client.get("/v1/models", params={name: key})
        assert error_of(answer) == REFUSED


async def test_health_needs_no_key_and_metrics_one_that_may_look(stack: Any) -> None:
    user = await put_key(stack.fleet.bus, "k1")
    viewer = await put_key(stack.fleet.bus, "k2", role=Role.VIEWER)
    await known(stack, viewer)
    assert (await stack.client.get("/health/live")).status_code == 200
    assert (await stack.client.get("/health/ready")).status_code == 200
    assert error_of(await stack.client.get("/metrics")) == REFUSED
    assert error_of(await stack.client.get("/metrics", headers=bearer(user))) == (
        403,
        "permission_error",
        "forbidden",
    )
    assert (await stack.client.get("/metrics", headers=bearer(viewer))).status_code == 200
    assert (await chat(stack, viewer)).status_code == 403


async def test_metrics_may_be_left_open(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, open_metrics=True) as stack:
        await put_key(stack.fleet.bus, "k1")
        await stack.until(lambda: not stack.gateway.keyring.open)
        assert (await stack.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"revoked_unix_ms": LONG_AGO_MS}, "was revoked"),
        ({"expires_unix_ms": LONG_AGO_MS}, "has expired"),
    ],
)
async def test_a_key_that_counts_no_more(stack: Any, changes: dict[str, Any], says: str) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    await known(stack, key)
    await put_key(stack.fleet.bus, "k1", **changes)
    await stack.until(lambda: refused(stack, key))
    answer = await chat(stack, key)
    assert error_of(answer) == REFUSED
    assert says in answer.text
    assert error_of(await chat(stack, None)) == REFUSED  # the door stays closed


async def refused(stack: Any, key: str) -> bool:
    return not await status_of(stack, key)


async def test_keys_of_a_purged_tenant_do_not_count(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1", tenant="acme")
    await known(stack, key)
    await put_tenant(stack.fleet.bus, "acme", RateLimits(), purged_unix_ms=LONG_AGO_MS)
    await stack.until(lambda: refused(stack, key))


async def test_a_forgotten_last_key_opens_the_door_on_loopback(stack: Any) -> None:
    await put_key(stack.fleet.bus, "k1")
    await stack.until(lambda: not stack.gateway.keyring.open)
    await keys_bucket(stack.fleet.bus).delete(key_entry("k1"))
    await stack.until(lambda: stack.gateway.keyring.open)
    assert (await chat(stack, None)).status_code == 200


async def test_another_address_is_not_served_without_a_key() -> None:
    broker = MemoryBroker()
    bus = broker.connect("g")
    with pytest.raises(Permanent, match=r"0\.0\.0\.0 without an API key.*diptych keys create"):
        await Keyring(bus, host="0.0.0.0", allowed=False).start()
    by_leave = Keyring(bus, host="0.0.0.0", allowed=True)
    await by_leave.start()
    assert by_leave.open
    await put_key(bus, "k1")
    closed = Keyring(bus, host="0.0.0.0", allowed=True)
    await closed.start()
    assert not closed.open
    for keyring in (by_leave, closed):
        await keyring.close()
    await bus.close()


async def test_before_the_keys_are_known_nobody_is_served() -> None:
    bus = MemoryBroker().connect("g")
    keyring = Keyring(bus, host="127.0.0.1", allowed=True)
    assert not keyring.open
    with pytest.raises(Transient, match="not known yet"):
        keyring.caller(None)
    await bus.close()


async def test_a_key_that_is_replaced_counts_no_more() -> None:
    broker = MemoryBroker()
    bus = broker.connect("g")
    old = await put_key(bus, "k1", tenant="acme")
    keyring = Keyring(bus, host="127.0.0.1", allowed=False)
    await keyring.start()
    limits = RateLimits(concurrency=3)
    await put_tenant(bus, "acme", limits)
    await put_key(bus, "k1", tenant="rival", sha256="00" * 32)
    await heard()
    with pytest.raises(ApiError):
        keyring.caller(old)
    new = await put_key(bus, "k2", tenant="acme")
    await heard()
    assert keyring.keys == 2
    assert [holder.limits for holder in keyring.caller(new).holders] == [limits]
    await keyring.close()
    await bus.close()


async def test_who_asks_from_inside_needs_no_key_but_has_its_tenants_limits() -> None:
    """A batch's lines run long after the request that made it, perhaps at another gateway."""
    bus = MemoryBroker().connect("g")
    await put_key(bus, "k1", tenant="acme")
    limits = RateLimits(requests_per_minute=5)
    await put_tenant(bus, "acme", limits)
    keyring = Keyring(bus, host="127.0.0.1", allowed=False)
    await keyring.start()
    (holder,) = keyring.renewed(Caller(tenant="acme")).holders
    assert holder.limits == limits
    assert keyring.renewed(Caller(tenant="rival")).holders == ()
    with pytest.raises(ApiError, match="no longer one of this server's"):
        keyring.renewed(ANONYMOUS)
    await put_tenant(bus, "acme", RateLimits(), purged_unix_ms=LONG_AGO_MS)
    await heard()
    with pytest.raises(ApiError, match="is no more"):
        keyring.renewed(Caller(tenant="acme"))
    await keyring.close()
    await bus.close()


async def test_those_without_a_key_have_the_limits_of_their_tenant(stack: Any) -> None:
    await put_tenant(stack.fleet.bus, "default", RateLimits(requests_per_minute=1))
    await stack.until(lambda: stack.gateway.keyring.anybody.holders)
    first, second = await chat(stack, None), await chat(stack, None)
    assert (first.status_code, second.status_code) == (200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "1"


# One tenant and another


async def tenants(stack: Any) -> tuple[dict[str, str], dict[str, str]]:
    mine = await put_key(stack.fleet.bus, "k1", tenant="acme")
    theirs = await put_key(stack.fleet.bus, "k2", tenant="rival")
    await known(stack, theirs)
    return bearer(mine), bearer(theirs)


def like(answer: httpx.Response, stored_id: str, other_id: str) -> tuple[int, str]:
    return answer.status_code, answer.text.replace(stored_id, "ID").replace(other_id, "ID")


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("DELETE", ""),
        ("POST", "/cancel"),
    ],
)
async def test_anothers_response_is_as_an_unknown_one(stack: Any, method: str, suffix: str) -> None:
    mine, theirs = await tenants(stack)
    made = await stack.client.post("/v1/responses", json=stack.asked(), headers=mine)
    response_id, unknown = made.json()["id"], "resp_" + "0" * 32
    answers = [
        await stack.client.request(method, f"/v1/responses/{wanted}{suffix}", headers=theirs)
        for wanted in (response_id, unknown)
    ]
    foreign, missing = (like(answer, response_id, unknown) for answer in answers)
    assert foreign == missing
    assert missing[0] == 404
    kept = await stack.client.get(f"/v1/responses/{response_id}", headers=mine)
    assert kept.status_code == 200
    assert kept.json()["status"] == "completed"


async def test_nobody_goes_on_with_anothers_response(stack: Any) -> None:
    mine, theirs = await tenants(stack)
    made = await stack.client.post("/v1/responses", json=stack.asked(), headers=mine)
    response_id, unknown = made.json()["id"], "resp_" + "0" * 32
    answers = []
    for wanted in (response_id, unknown):
        body = stack.asked(previous_response_id=wanted)
        answers.append(await stack.client.post("/v1/responses", json=body, headers=theirs))
    foreign, missing = (like(answer, response_id, unknown) for answer in answers)
    assert foreign == missing
    assert missing[0] == 400
    mine_again = stack.asked(previous_response_id=response_id)
    assert (
        await stack.client.post("/v1/responses", json=mine_again, headers=mine)
    ).status_code == 200


async def test_anothers_chat_answer_is_as_an_unknown_one(stack: Any) -> None:
    mine, theirs = await tenants(stack)
    headers = {**mine, "x-diptych-resume": "1"}
    made = await stack.client.post(CHAT, json=stack.body(), headers=headers)
    answer_id, unknown = made.json()["id"], "chatcmpl-" + "0" * 32
    request = stack.fleet.requests[0]
    await put_record(stack, request)
    answers = [
        await stack.client.get(f"{CHAT}/{wanted}", headers=theirs)
        for wanted in (answer_id, unknown)
    ]
    foreign, missing = (like(answer, answer_id, unknown) for answer in answers)
    assert foreign == missing
    own = await stack.client.get(f"{CHAT}/{answer_id}", headers=mine)
    assert own.json()["choices"][0]["message"]["content"] == "Hello world"


async def put_record(stack: Any, request: Any) -> None:
    """What a scheduler writes; the scripted fleet has none."""
    from diptych_contracts.ids import Incarnation
    from diptych_contracts.requests import RecordState, RequestRecord
    from diptych_contracts.streams import REQUEST_RECORDS

    record = RequestRecord(
        request_id=request.request_id,
        owner=Incarnation("scheduler-1"),
        gateway=request.gateway,
        state=RecordState.CLOSED,
        request_seq=1,
        head=request.head,
        tenant=request.tenant,
    )
    await stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).put(request.request_id, record)


# WebSockets


def url_of(stack: Any) -> str:
    return str(stack.base_url.replace("http", "ws")) + "/responses"


FRAME = json.dumps({"type": "response.create", "model": "tiny", "input": "Hello"})


async def last_event(socket: Any, *kinds: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (event := json.loads(await socket.recv()))["type"] not in kinds:
            pass
    found: dict[str, Any] = event
    return found


@pytest.mark.parametrize(
    "offer",
    [
        {"additional_headers": "bearer"},
        {"subprotocols": ["diptych", "diptych-api-key.{}"]},
        {"subprotocols": ["realtime", "openai-insecure-api-key.{}"]},
    ],
)
async def test_a_socket_shows_its_key_by_header_or_subprotocol(
    stack: Any, offer: dict[str, Any]
) -> None:
    key = await put_key(stack.fleet.bus, "k1", tenant="acme")
    await known(stack, key)
    options: dict[str, Any] = {"additional_headers": bearer(key)}
    if "subprotocols" in offer:
        options = {"subprotocols": [one.format(key) for one in offer["subprotocols"]]}
    async with connect(url_of(stack), **options) as socket:
        expected = offer["subprotocols"][0] if "subprotocols" in offer else None
        assert socket.subprotocol == expected
        await socket.send(FRAME)
        await last_event(socket, "response.completed")
    assert [request.tenant for request in stack.fleet.requests] == ["acme"]


async def test_a_socket_without_a_good_key_is_refused_before_it_opens(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    await known(stack, key)
    for options in (
        {},
        {"subprotocols": ["diptych", "diptych-api-key.dk-wrong"]},
        {"additional_headers": bearer("dk-wrong")},
        {"additional_headers": bearer(key), "subprotocols": [f"diptych-api-key.{key}"]},
    ):
        with pytest.raises(websockets.InvalidStatus) as refusal:
            async with connect(url_of(stack), **options):
                pass
        assert refusal.value.response.status_code == 401
        assert key.encode() not in refusal.value.response.body


async def test_a_socket_outlives_its_key_but_takes_no_more_turns(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1")
    await known(stack, key)
    async with connect(url_of(stack), additional_headers=bearer(key)) as socket:
        await socket.send(FRAME)
        await last_event(socket, "response.completed")
        await put_key(stack.fleet.bus, "k1", revoked_unix_ms=LONG_AGO_MS)
        await stack.until(lambda: refused(stack, key))
        await socket.send(FRAME)
        event = await last_event(socket, "error")
    assert (event["status"], event["error"]["code"]) == (401, "invalid_api_key")


async def test_an_answer_under_way_survives_the_end_of_its_key(run_stack: Any) -> None:
    go_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        ids = fleet.ids("Hello world")
        fleet.say(request, ids[:1])
        await go_on.wait()
        fleet.say(request, ids[1:], index=1, end=EndReason.STOP)

    async with run_stack(script) as stack:
        key = await put_key(stack.fleet.bus, "k1")
        await known(stack, key)
        asking = asyncio.create_task(chat(stack, key))
        await stack.until(lambda: stack.fleet.requests)
        await put_key(stack.fleet.bus, "k1", revoked_unix_ms=LONG_AGO_MS)
        await stack.until(lambda: refused(stack, key))
        go_on.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize(
    ("offered", "answer"),
    [
        ([], None),
        (["chat"], None),
        (["diptych-api-key.x"], None),
        (["diptych-api-key.x", "diptych"], "diptych"),
        (["openai-insecure-api-key.x", "realtime", "openai-beta.realtime-v1"], "realtime"),
    ],
)
def test_no_secret_is_said_back(offered: list[str], answer: str | None) -> None:
    assert chosen_subprotocol({"subprotocols": offered}) == answer


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", "/health/live", None),
        ("GET", "/health/ready", None),
        ("GET", "/openapi.json", None),
        ("GET", "/metrics", Right.LOOK),
        ("GET", "/v1/models", Right.LIST),
        ("GET", "/v1/models/a/b", Right.LIST),
        ("DELETE", "/v1/models/a", Right.ASK),
        ("GET", "/v1/responses/x", Right.ASK),
        ("POST", "/v1/chat/completions", Right.ASK),
        ("GET", "/health/live/", Right.ASK),
        ("GET", "/no/such/path", Right.ASK),
        ("GET", "/admin/v1/keys", Right.ADMINISTER),
        ("POST", "/admin/v1/keys", Right.ADMINISTER),
        ("GET", "/admin/v1/usage", Right.ACCOUNT),
        ("GET", "/admin/v1/nothing", Right.ADMINISTER),
    ],
)
def test_which_right_a_path_takes(method: str, path: str, right: Right | None) -> None:
    assert needs(method, path) is right


async def test_a_key_is_judged_again_when_a_body_that_took_long_is_whole(stack: Any) -> None:
    key = await put_key(stack.fleet.bus, "k1", tenant="acme")
    await known(stack, key)
    gone = asyncio.Event()

    async def slowly() -> Any:
        yield b'{"model": "tiny", '
        await put_tenant(stack.fleet.bus, "acme", RateLimits(), purged_unix_ms=LONG_AGO_MS)
        await stack.until(lambda: refused_of(stack, key))
        gone.set()
        yield b'"messages": [{"role": "user", "content": "Hello"}]}'

    headers = {**bearer(key), "content-type": "application/json"}
    answer = await stack.client.post(CHAT, content=slowly(), headers=headers)
    assert gone.is_set()
    assert error_of(answer) == REFUSED
    assert "is no more" in answer.text
    assert stack.fleet.requests == []


async def refused_of(stack: Any, key: str) -> bool:
    answer = await stack.client.get("/v1/models", headers=bearer(key))
    return bool(answer.status_code == 401)
