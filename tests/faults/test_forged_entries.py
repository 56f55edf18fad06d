"""Who holds a worker's credential, and no job, cannot speak for a request.

The thief may publish on the journal, as every worker may. What it says is stored and republished
like anything else; each reader drops it for its voice, counts it, and says so once per request.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Request, RequestRecord
from diptych_contracts.sampling import Stopping
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_policy.journal import JournalPart
from diptych_policy.voices import attempt_voice, owner_voice
from diptych_telemetry import metrics
from diptych_testkit.aftermath import nothing_is_left
from diptych_testkit.builders import GATEWAY, a_request
from diptych_testkit.forgeries import THIEF, forgeries, framed
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, small_gateway
from diptych_testkit.toy_engine import ToyStepEngine, toy_answer

PROMPT = tuple(range(1, 101))
RID = RequestId("r1")
TOKENS = 120


def a_long_request() -> Request:
    return a_request(RID, prompt_ids=PROMPT, stopping=Stopping(max_tokens=TOKENS))


async def a_fleet(fleet: SmallFleet, decodes: int = 1) -> None:
    fleet.scheduler()
    fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=0.004))
    for number in range(1, decodes + 1):
        fleet.worker(f"d{number}", Role.DECODE, engine=ToyStepEngine(step_s=0.004))
    await fleet.ready()


async def say(
    fleet: SmallFleet, said: Sequence[JournalPart], gateway: Incarnation = GATEWAY
) -> None:
    """Publish by hand, from a connection of the thief's own."""
    thief = fleet.broker.connect(THIEF)
    for entry in framed(said):
        await thief.record(gateway, entry, timeout_s=1.0)
    await thief.close()


async def record_of(fleet: SmallFleet, request_id: str = RID) -> RequestRecord:
    kept = await fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).get(request_id)
    assert kept is not None
    return kept.value


def others_voices(secret: bytes, attempt: int) -> list[bytes]:
    """What a thief may have: nothing, a guess, and what it was given for something else."""
    return [
        b"",
        b"\0" * 16,
        attempt_voice(b"another request's", attempt),
        owner_voice(b"another request's"),
        attempt_voice(secret, attempt + 1),
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize("which", range(5))
async def test_nobody_speaks_for_a_request_it_does_not_hold(which: int) -> None:
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        await fleet.client.send(a_long_request())
        await fleet.client.has_tokens(RID, 20)
        secret = fleet.client.views[RID].secret
        voice = others_voices(secret, 1)[which]
        said = forgeries(RID, 1, voice, index=len(fleet.client.delivered[RID]))
        await say(fleet, said)
        end = await fleet.client.ended(RID)
        assert (end.reason, end.tokens, end.attempt) == (EndReason.LENGTH, TOKENS, 1)
        assert fleet.client.delivered[RID] == toy_answer(PROMPT, TOKENS)
        assert fleet.client.views[RID].forged == len(said)
        assert fleet.ledgers["s1"].forged == len(said)
        record = await fleet.closed(RID)
        assert (record.attempt, record.lost_attempts, record.setbacks) == (1, 0, ())


@pytest.mark.virtual_time
async def test_an_attempts_worker_cannot_speak_as_the_attempt_that_replaced_it() -> None:
    """Nor announce one itself."""
    async with small_fleet() as fleet:
        await a_fleet(fleet, decodes=2)
        await fleet.client.send(a_long_request())
        await fleet.client.has_tokens(RID, 10)
        first = attempt_voice(fleet.client.views[RID].secret, 1)
        await say(fleet, forgeries(RID, 1, first)[2:3])  # a fence
        assert fleet.client.views[RID].attempt == 1
        assignment = (await record_of(fleet)).assignment
        assert assignment is not None
        await fleet.kill(fleet.name_of(assignment.decode))
        await fleet.client.until(lambda: fleet.client.views[RID].attempt == 2)
        known = len(fleet.client.delivered[RID])
        await say(fleet, forgeries(RID, 2, first, index=known))
        await say(fleet, forgeries(RID, 1, first, index=known)[:2])  # behind the fence: just late
        end = await fleet.client.ended(RID)
        assert (end.reason, end.attempt) == (EndReason.LENGTH, 2)
        assert fleet.client.delivered[RID] == toy_answer(PROMPT, TOKENS)
        assert fleet.client.views[RID].forged == 6


@pytest.mark.virtual_time
async def test_an_adopter_is_not_deceived_either() -> None:
    """What was forged before it came stands in the journal that it reads."""
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        await fleet.client.send(a_long_request())
        await fleet.client.has_tokens(RID, 10)
        await say(fleet, forgeries(RID, 1, b"\1" * 16, index=len(fleet.client.delivered[RID])))
        fleet.scheduler("s2")
        await fleet.ready("s2")
        await fleet.kill("s1")
        assert (await fleet.client.ended(RID)).reason is EndReason.LENGTH
        assert fleet.client.delivered[RID] == toy_answer(PROMPT, TOKENS)
        record = await fleet.closed(RID)
        assert record.end is not None
        assert (record.end.reason, record.attempt) == (EndReason.LENGTH, 1)
        assert fleet.ledgers["s2"].forged == 5


@pytest.mark.virtual_time
async def test_a_request_of_an_older_gateway_goes_on_as_before() -> None:
    """No secret, no voices: old and new processes meet during a roll-out."""
    async with small_fleet() as fleet:
        await a_fleet(fleet)
        await fleet.client.send(a_long_request(), voices=False)
        assert (await fleet.client.ended(RID)).reason is EndReason.LENGTH
        assert (await record_of(fleet)).secret == b""
        await nothing_is_left(fleet)


async def test_a_clients_text_is_the_same() -> None:
    """Through a real gateway's front door; a flood is one line, and a number."""
    async with small_fleet() as fleet:
        fleet.scheduler()
        fleet.worker("p1", Role.PREFILL, engine=ToyStepEngine(step_s=0.01, vocab_size=VOCAB_SIZE))
        fleet.worker("d1", Role.DECODE, engine=ToyStepEngine(step_s=0.01, vocab_size=VOCAB_SIZE))
        await fleet.ready()
        async with small_gateway(fleet, "g1") as gateway:
            body = {
                "model": "toy",
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 60,
                "seed": 7,
                "stream": True,
            }
            undisturbed = await told(gateway, body)
            before = metrics.gateway().forged._value.get()
            asking = asyncio.create_task(told(gateway, body))
            request_id = await running(fleet)
            for _ in range(20):
                await say(fleet, forgeries(request_id, 1, b"", index=1), gateway.incarnation)
            assert await asking == undisturbed
            assert metrics.gateway().forged._value.get() == before + 100


async def told(gateway: Any, body: dict[str, Any]) -> list[Any]:
    return [
        choice.get("delta") or choice.get("finish_reason")
        async for event in gateway.events("/v1/chat/completions", body)
        for choice in event["choices"]
    ]


async def running(fleet: SmallFleet) -> RequestId:
    """The request that has not ended, once it is there."""
    while True:
        for key in list(fleet.broker.bucket(REQUEST_RECORDS).values):
            record = await record_of(fleet, key)
            if record.end is None and record.assignment is not None:
                return record.request_id
        await asyncio.sleep(0.005)
