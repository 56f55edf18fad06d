"""The calls behind one that asks for several answers: each becomes a request of its own."""

from dataclasses import replace

import msgspec

from diptych_gateway.admission.accepting import Acceptance
from diptych_gateway.judging.checking import Call, Prompt


async def siblings(call: Call, acceptance: Acceptance) -> list[Call]:
    """A call for each answer to `call`, whose text is made tokens once for all.

    With a seed the `n`-th has `seed + n`: alone, it would be answered the same.

    Raises:
        DiptychError: what `Acceptance.prompt_ids` raises.
    """
    ids = await acceptance.prompt_ids(call, acceptance.served(call.model))
    prompt = Prompt(ids=ids, chat=call.prompt is None)
    one = replace(call, messages=[], prompt=prompt, choices=1)
    if not call.seeded:
        return [one] * call.choices
    return [
        replace(one, sampling=msgspec.structs.replace(one.sampling, seed=seed))
        for seed in seeds(call.sampling.seed, call.choices)
    ]


def seeds(first: int, count: int) -> list[int]:
    """`first` and those that follow it, in 64 bits."""
    return [(first + n + 2**63) % 2**64 - 2**63 for n in range(count)]
