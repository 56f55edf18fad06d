"""What no gateway lets pass, in a request that came otherwise: it ends, and only it.

A prompt's block with an id that no model has has no hash. Whoever computed one died: the
schedulers, one after the other, and with `KV_REUSE` or KV tiers each worker that was asked.
"""

import math

import pytest

from diptych_contracts import subjects
from diptych_contracts.fleet import Role
from diptych_contracts.ids import RequestId, transfer_id
from diptych_contracts.jobs import RefusalReason
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Forced, Mode
from diptych_contracts.sampling import Sampling
from diptych_contracts.transfers import Reserve, ReserveAnswer, ReserveRefused
from diptych_kvtiers.host_tier import HostTier
from diptych_testkit.builders import a_generation, a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.toy_engine import ToyStepEngine

pytestmark = pytest.mark.virtual_time

strange_ids = pytest.mark.parametrize("strange", [2**31, -(2**31) - 1])


async def a_fleet(fleet: SmallFleet) -> None:
    fleet.scheduler("s1")
    for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
        engine = ToyStepEngine(prefix_sequences=4)
        tiers = (HostTier(1 << 20),)
        fleet.worker(name, role, engine=engine, tiers=tiers, kv_reuse=True, kv_restore="always")
    await fleet.ready()


def with_an(strange: int) -> tuple[int, ...]:
    return (1, 2, strange, *range(3, 200))


@strange_ids
@pytest.mark.parametrize("mode", [Mode.REMOTE, Mode.LOCAL])
async def test_a_request_with_one_ends_and_ends_nobody(mode: Mode, strange: int) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        prompt_ids = with_an(strange)
        await fleet.client.send(a_request("r1", prompt_ids=prompt_ids, forced=Forced(mode=mode)))
        assert (await fleet.client.ended("r1")).reason is EndReason.FAILED
        await fleet.client.send(a_request("r2"))
        assert (await fleet.client.ended("r2")).reason is EndReason.LENGTH
        await fleet.settled()
        assert not fleet.crashes


@pytest.mark.parametrize("mode", [Mode.REMOTE, Mode.LOCAL])
@pytest.mark.parametrize(
    "sampling", [Sampling(min_p=2.0), Sampling(temperature=math.nan), Sampling(top_logprobs=-1)]
)
async def test_sampling_that_leaves_nothing_to_choose_ends_no_worker(
    sampling: Sampling, mode: Mode
) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        await fleet.client.send(a_request("r1", sampling=sampling, forced=Forced(mode=mode)))
        end = await fleet.client.ended("r1")
        assert end.reason is EndReason.FAILED
        assert "expected" in end.detail
        await fleet.settled()
        assert not fleet.crashes


@strange_ids
async def test_a_ticket_for_one_is_refused(strange: int) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        spec = fleet.loops["d1"].spec
        reserve = Reserve(
            transfer_id=transfer_id(RequestId("r1"), 1),
            generation=a_generation("r1", prompt_ids=with_an(strange)),
            prefill_worker=fleet.incarnation("p1"),
            link="shm",
            layout=spec.layout,
            fingerprint=spec.fingerprint,
            leaves_out=True,
        )
        subject = subjects.kv(fleet.incarnation("d1"), "reserve")
        answer = await fleet.bus.request(subject, reserve, ReserveAnswer, timeout_s=2.0)
        assert isinstance(answer, ReserveRefused)
        assert answer.reason == RefusalReason.WRONG_MODEL
        await fleet.settled()
        assert not fleet.crashes
