"""What following a grammar costs per token: the mask, and the ending that is kept beside it.

    python bench/masks.py [GGUF]

Every schema of the list is answered by random draws with the tokens of a real model; no model runs.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from random import Random

import numpy as np

from diptych_contracts.sampling import Grammar
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.matching import Grammars
from diptych_testkit.live_stack import gguf_path
from diptych_testkit.structured_list import schema_list
from diptych_text.codec import TextCodec

MOST = 80


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else gguf_path()
    card = card_from_gguf(path, model="bench")
    codec = TextCodec.from_card(card)
    began_s = time.thread_time()
    grammars = Grammars(codec, card.eos_ids)
    print(f"tokens of {card.vocab_size}: {(time.thread_time() - began_s) * 1000:.0f} ms")
    costs: dict[str, list[float]] = {"set up": [], "mask": [], "settle": []}
    for entry in schema_list():
        answer(grammars, entry["schema"], costs, vocab_size=card.vocab_size)
    for name, taken in costs.items():
        taken = sorted(cost * 1e6 for cost in taken)
        p99 = taken[int(len(taken) * 0.99)]
        print(
            f"{name:8} {len(taken):6} times: mean {statistics.mean(taken):7.0f} us, "
            f"median {statistics.median(taken):7.0f}, p99 {p99:7.0f}, most {taken[-1]:7.0f}"
        )


def answer(
    grammars: Grammars, schema: object, costs: dict[str, list[float]], *, vocab_size: int
) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    began_s = time.thread_time()
    matcher = grammars.matcher(grammar, (), max_tokens=MOST)
    costs["set up"].append(time.thread_time() - began_s)
    for place in range(MOST):
        began_s = time.thread_time()
        allowed = matcher.allowed(vocab_size)
        costs["mask"].append(time.thread_time() - began_s)
        drawn = int(Random(place).choice(np.flatnonzero(allowed)))
        began_s = time.thread_time()
        token = matcher.settle(drawn, left=MOST - place)
        costs["settle"].append(time.thread_time() - began_s)
        if token is None or matcher.complete:
            return


if __name__ == "__main__":
    main()
