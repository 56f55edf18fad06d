"""What tests ask of an adapter directly, without a loop around it."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.adapters import AdapterSettings
from diptych_engine.port import Phase, SequenceKey, SequenceWork
from diptych_engine.request_port import RequestEngine, TokenDelta
from diptych_engine.sim_card import sim_card
from diptych_testkit.toy_engine import EOS_ID, GREEDY


def adapter_settings(name: str, url: str, **changes: Any) -> AdapterSettings:
    """Settings of an adapter in front of a toy model of 1000 tokens."""
    card = msgspec.structs.replace(sim_card(model="toy"), vocab_size=1000, eos_ids=(EOS_ID,))
    values: dict[str, Any] = {"card": card, "role": Role.DECODE, "url": url}
    values |= {"kv_tokens": 16_384, "max_sequences": 64}
    return AdapterSettings(name=name, **(values | changes))


def a_work(
    phase: Phase = Phase.GENERATE,
    *,
    request_id: str = "r1",
    prompt_ids: Sequence[int] = tuple(range(1, 50)),
    max_tokens: int = 8,
    sampling: Sampling = GREEDY,
    **changes: Any,
) -> SequenceWork:
    """A small greedy request."""
    values: dict[str, Any] = {"answer_ids": (), "stopping": Stopping(max_tokens=max_tokens)}
    return SequenceWork(
        key=SequenceKey(RequestId(request_id), 1),
        phase=phase,
        prompt_ids=prompt_ids,
        sampling=sampling,
        **(values | changes),
    )


async def deltas_of(engine: RequestEngine, work: SequenceWork) -> list[TokenDelta]:
    """All that comes of `work`."""
    found = []
    async with aclosing(engine.generate(work)) as stream:  # type: ignore[type-var]
        async for delta in stream:
            found.append(delta)
    return found


async def answer_of(engine: RequestEngine, work: SequenceWork) -> list[int]:
    """The tokens that come of `work`."""
    return [token for delta in await deltas_of(engine, work) for token in delta.token_ids]


async def handed_over(engine: RequestEngine, work: SequenceWork) -> EngineHandOff:
    """What a sequential prefill offers."""
    offers: list[EngineHandOff] = []
    await engine.prefill(work, offers.append)
    (offer,) = offers
    return offer
