"""The bus itself is away, comes back, or has lost the beginning of an answer.

`docs/testing.md` names the row of each; the server's own deaths are in `tests/live`.
"""

import asyncio
import dataclasses

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.journal import EndReason
from diptych_contracts.streams import STREAMS, TOKENS
from diptych_testkit.aftermath import journal_of
from diptych_testkit.builders import REQUEST
from diptych_testkit.cut_fleet import LONG, cut_fleet
from diptych_testkit.interruptions import Call

pytestmark = pytest.mark.virtual_time
SMALL_JOURNAL = (
    *(spec for spec in STREAMS if spec is not TOKENS),
    dataclasses.replace(TOKENS, max_bytes=8192),
)


@pytest.mark.parametrize("away_s", [0.3, 2.0])
async def test_the_server_is_away_and_nobody_is_taken_for_dead(away_s: float) -> None:
    async with cut_fleet() as case:
        await case.start("s1", decodes=2)
        await case.ask(LONG)
        await case.ask(LONG, "r2")
        await case.fleet.client.has_tokens(REQUEST, 20)
        case.broker.go_away()
        await asyncio.sleep(away_s)
        case.broker.come_back()
        await case.ask(request_id="r3")
        for name, tokens in ((REQUEST, LONG), ("r2", LONG), ("r3", 16)):
            record = await case.is_answered(tokens, name)
            assert (record.attempt, record.adoptions) == (1, 0)


async def test_the_server_goes_away_between_any_two_steps_of_a_request() -> None:
    """It is away for a moment before each single call of the scheduler, in turn."""
    async with cut_fleet() as case:
        await case.start("s1")
        calls = 0

        def every_call(call: Call) -> bool:
            nonlocal calls
            if call.kind in ("publish", "get"):
                return False
            calls += 1
            case.broker.go_away()
            asyncio.get_running_loop().call_later(0.02, case.broker.come_back)
            return False

        case.broker.note("s1", every_call)
        await case.ask(40)
        record = await case.is_answered(40)
        assert record.attempt == 1
        assert calls >= 8


async def test_recovery_with_a_hole_fails_the_request_and_says_why() -> None:
    async with cut_fleet(streams=SMALL_JOURNAL) as case:
        await case.start("s1")
        await case.ask(2 * LONG)
        await case.fleet.client.has_tokens(REQUEST, 400)
        await case.join("s2")
        await case.fleet.kill("s1")
        end = await case.fleet.client.ended(REQUEST)
        assert end.reason is EndReason.FAILED
        assert end.detail == "the journal holds only a part of its answer"
        assert case.fleet.client.views[REQUEST].attempt == 1
        await case.fleet.settled()
        assert (await case.fleet.closed(REQUEST)).end == end


async def test_an_owner_needs_no_journal_to_recover_what_it_saw_itself() -> None:
    async with cut_fleet(streams=SMALL_JOURNAL) as case:
        await case.start("s1")
        await case.ask(LONG)
        await case.fleet.client.has_tokens(REQUEST, 400)
        await case.join("d2", Role.DECODE)
        await case.fleet.kill("d1")
        await case.fleet.client.ended(REQUEST)
        await case.fleet.settled()
        record = await case.fleet.closed(REQUEST)
        assert (record.attempt, record.end is not None) == (2, True)
        assert len(case.fleet.client.delivered[REQUEST]) == LONG
        assert len(journal_of(case.fleet, REQUEST)) < LONG
