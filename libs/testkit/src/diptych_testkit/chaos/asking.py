"""Which requests are made: a pure function of a seed and a slot.

Every prompt of the catalogue is asked again and again, each time with another length or another way
to leave, so that one undisturbed answer (its longest) serves to check all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from diptych_contracts.sampling import Sampling

LONGEST_TOKENS = 128
_SHORTEST_TOKENS = 32
_TOPICS = (
    "a lighthouse keeper",
    "the sea in winter",
    "a clock that runs backwards",
    "two brothers and a boat",
    "the number seven",
    "a garden on the roof",
    "how bread is made",
    "a train that is late",
)
_ORDERS = ("Write a long story about", "Explain to a child, step by step,")
_LONG = "Here are my notes so far, read them first. " + " ".join(
    f"Note {number}: the {noun} was seen again on day {number * 3}, a little further to the east."
    for number, noun in enumerate(("ship", "bird", "cart", "lamp", "dog", "cloud") * 2)
)


class Api(StrEnum):
    """How a request is made."""

    CHAT = "chat"
    RESPONSES = "responses"


class Leaving(StrEnum):
    """How its client ends it early, if it does."""

    NEVER = "never"
    EARLY = "early"
    """Hangs up after a while, perhaps before the first token."""
    MIDWAY = "midway"
    """Hangs up after some pieces of text."""
    CANCEL = "cancel"
    """Asks for the cancellation, after some pieces, and stays for the end. Responses only."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the catalogue, with how its answer is sampled."""

    text: str
    sampling: Sampling

    @property
    def messages(self) -> list[dict[str, str]]:
        """As chat messages."""
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: int
    """Its place in the catalogue."""
    api: Api
    max_tokens: int
    resume: bool = False
    """Whether its client may come back; stored responses always may."""
    leaving: Leaving = Leaving.NEVER
    after_pieces: int = 0
    after_s: float = 0.0


def catalogue() -> tuple[Prompt, ...]:
    """Short and long prompts, half of them greedy."""
    prompts = []
    for n_order, order in enumerate(_ORDERS):
        for number, topic in enumerate(_TOPICS):
            long = number % 4 == 3
            text = f"{_LONG} {order} {topic}." if long else f"{order} {topic}."
            seeded = Sampling(temperature=0.8, seed=1000 * n_order + number)
            greedy = Sampling(temperature=0.0)
            prompts.append(Prompt(text, seeded if (number + n_order) % 2 else greedy))
    return tuple(prompts)


def asks(seed: int, slot: int, n_prompts: int) -> Iterator[Ask]:
    """The requests of one slot, one after another, without end."""
    rng = Random(f"{seed}.{slot}")
    while True:
        api = rng.choice((Api.CHAT, Api.RESPONSES))
        leaving = _leaving(rng, api)
        yield Ask(
            prompt=rng.randrange(n_prompts),
            api=api,
            max_tokens=rng.randrange(_SHORTEST_TOKENS, LONGEST_TOKENS + 1),
            resume=api is Api.RESPONSES or rng.random() < 0.3,
            leaving=leaving,
            after_pieces=rng.randrange(1, 40),
            after_s=rng.uniform(0.0, 2.0),
        )


def _leaving(rng: Random, api: Api) -> Leaving:
    if rng.random() < 0.75:
        return Leaving.NEVER
    ways = [Leaving.EARLY, Leaving.MIDWAY]
    return rng.choice(ways if api is Api.CHAT else [*ways, Leaving.CANCEL])


def chat_body(ask: Ask, prompt: Prompt, model: str) -> dict[str, Any]:
    """The JSON of a chat completion."""
    return {
        **_sampled(prompt, model),
        "messages": prompt.messages,
        "max_tokens": ask.max_tokens,
        "stream_options": {"include_usage": True},
    }


def response_body(ask: Ask, prompt: Prompt, model: str) -> dict[str, Any]:
    """The JSON of a response."""
    return {
        **_sampled(prompt, model),
        "input": prompt.text,
        "max_output_tokens": ask.max_tokens,
    }


def _sampled(prompt: Prompt, model: str) -> dict[str, Any]:
    sampling = prompt.sampling
    body = {"model": model, "stream": True, "temperature": sampling.temperature}
    return body | ({"seed": sampling.seed} if sampling.temperature else {})
