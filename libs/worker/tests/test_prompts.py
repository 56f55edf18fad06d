import asyncio
from collections.abc import Callable, Sequence

import pytest

from diptych_bus.memory import MemoryBroker
from diptych_contracts.errors import BusAway, Expired, Permanent, Unverified
from diptych_contracts.jobs import Generation
from diptych_contracts.streams import PROMPTS
from diptych_testkit.builders import a_generation, a_request, by_reference
from diptych_worker import prompts
from diptych_worker.prompts import Prompts


class Store:
    """A bus that counts what is fetched from it."""

    def __init__(self) -> None:
        self.bus = MemoryBroker().connect("worker")
        self.fetched: list[str] = []
        self._get = self.bus.get_object
        self.bus.get_object = self.get  # type: ignore[method-assign]
        self.fail: Callable[[], None] = lambda: None

    async def get(self, bucket: str, name: str) -> bytes | None:
        self.fetched.append(name)
        self.fail()
        return await self._get(bucket, name)

    async def put(self, name: str, ids: Sequence[int]) -> Generation:
        request, data = by_reference(a_request(name, prompt_ids=tuple(ids)))
        await self.bus.put_object(PROMPTS, name, data)
        return a_generation(name, prompt_ids=(), prompt=request.prompt)

    def prompts(self, cache_bytes: int = 1000) -> Prompts:
        return Prompts(self.bus, now_s=asyncio.get_running_loop().time, cache_bytes=cache_bytes)


@pytest.fixture
async def store() -> Store:
    return Store()


async def test_a_prompt_inline_costs_no_round_trip(store: Store) -> None:
    assert await store.prompts().ids(a_generation(prompt_ids=(5, 6))) == (5, 6)
    assert store.fetched == []


async def test_a_prompt_is_fetched_once_by_everybody_who_wants_it(store: Store) -> None:
    generation, held = await store.put("r1", (1, 2, 300)), store.prompts()
    held.expect(generation)
    found = await asyncio.gather(*(held.ids(generation) for _ in range(3)))
    assert [tuple(ids) for ids in found] == [(1, 2, 300)] * 3
    held.expect(generation)
    assert tuple(await held.ids(generation)) == (1, 2, 300)
    assert store.fetched == ["r1"]


async def test_who_gives_up_does_not_take_it_from_the_others(store: Store) -> None:
    generation, held = await store.put("r1", (1, 2, 3)), store.prompts()
    impatient = asyncio.create_task(held.ids(generation))
    patient = asyncio.create_task(held.ids(generation))
    await asyncio.sleep(0)
    impatient.cancel()
    assert tuple(await patient) == (1, 2, 3)
    assert store.fetched == ["r1"]


async def test_what_is_kept_is_bounded_and_the_latest(store: Store) -> None:
    held = store.prompts(cache_bytes=2000)
    jobs = [await store.put(f"r{n}", (n,) * 400) for n in range(1, 4)]
    for job in (jobs[0], jobs[1], jobs[0], jobs[2]):
        await held.ids(job)
    assert held.kept_bytes == 1600
    store.fetched.clear()
    await held.ids(jobs[0])
    await held.ids(jobs[1])
    assert store.fetched == ["r2"]
    huge = await store.put("r9", (1,) * 2000)
    assert len(await held.ids(huge)) == 2000
    assert held.kept_bytes == 0, "one that is larger than the room is not kept"


async def test_what_is_gone_or_altered_says_so(store: Store) -> None:
    generation, held = await store.put("r1", (1, 2, 3)), store.prompts()
    await store.bus.put_object(PROMPTS, "r1", b"\1\2\4")
    with pytest.raises(Unverified, match="prompt r1"):
        await held.ids(generation)
    await store.bus.delete_object(PROMPTS, "r1")
    with pytest.raises(Permanent, match="the prompt of the request is gone"):
        await held.ids(generation)


async def test_a_bus_that_does_not_answer_is_asked_again_for_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "FETCH_S", 0.35)
    generation, held = await store.put("r1", (1, 2, 3)), store.prompts()

    def away() -> None:
        if len(store.fetched) < 3:
            raise BusAway("no answer")

    store.fail = away
    assert tuple(await held.ids(generation)) == (1, 2, 3)
    other = await store.put("r2", (4,))
    store.fail = lambda: (_ for _ in ()).throw(BusAway("no answer"))  # type: ignore[assignment]
    with pytest.raises(Expired, match="did not come in"):
        await held.ids(other)


async def test_closing_ends_what_is_on_its_way(store: Store) -> None:
    generation, held = await store.put("r1", (1, 2, 3)), store.prompts()
    held.expect(generation)
    await held.close()
    assert tuple(await held.ids(generation)) == (1, 2, 3)
