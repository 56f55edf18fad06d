"""What it costs a gateway to know who asks, per request: `python bench/identity.py`.

The identity layer around an application that does nothing, without keys, with a key, and with one
that has limits; and taking and settling what such a request takes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from diptych_bus.memory import MemoryBroker
from diptych_contracts.ids import Incarnation
from diptych_contracts.keys import RateLimits
from diptych_gateway.doors.routes import needs
from diptych_gateway.tenancy.allowances import Allowances
from diptych_gateway.tenancy.identity import Identity
from diptych_gateway.tenancy.keyring import Keyring
from diptych_testkit.keys import bearer, put_key

ROUNDS = 20_000
_HEADERS = [
    (b"host", b"127.0.0.1:8080"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"user-agent", b"AsyncOpenAI/Python 3.57.0"),
    *((f"x-stainless-{n}".encode(), b"value") for n in range(7)),
]


async def _nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """Answer nothing."""


async def _time(what: str, step: Callable[[], Awaitable[Any]]) -> None:
    best_s = min([await _round(step) for _ in range(5)])
    print(f"{what:32} {best_s / ROUNDS * 1e6:6.2f} us")


async def _round(step: Callable[[], Awaitable[Any]]) -> float:
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        await step()
    return time.perf_counter() - began_s


async def main() -> None:
    """Print a line per kind of caller."""
    broker = MemoryBroker()
    bus = broker.connect("bench")
    keyring = Keyring(bus, host="127.0.0.1", allowed=False)
    await keyring.start()
    allowances = Allowances(bus, Incarnation("gateway-1"), time.monotonic)
    told = allowances.headers
    guarded = Identity(_nothing, keyring=keyring, needs=needs, told=told)

    def ask(app: Any, key: str | None) -> Callable[[], Awaitable[Any]]:
        shown = [(b"authorization", bearer(key)["Authorization"].encode())] if key else []
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "state": {}}
        scope["headers"] = [*_HEADERS, *shown]
        return lambda: app(scope, None, _nothing)

    await _time("the application alone", ask(_nothing, None))
    await _time("without keys", ask(guarded, None))
    free = await put_key(bus, "free")
    paying = await put_key(bus, "paying", limits=RateLimits(requests_per_minute=10**9))
    while keyring.open or keyring.keys < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await _time("with a key", ask(guarded, free))
    await _time("with a key that has limits", ask(guarded, paying))
    caller = keyring.caller(paying)

    async def take() -> None:
        taking = await allowances.take(caller, 100)
        assert taking is not None
        taking.settle(50)

    await _time("taking and settling", take)

    async def headers() -> None:
        allowances.headers(caller)

    await _time("x-ratelimit headers", headers)
    await keyring.close()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main())
