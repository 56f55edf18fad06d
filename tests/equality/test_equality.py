"""However a request goes, the answer is the bare engine's, token for token.

Modes and links, alone and in a crowd, with and without a cached prefix, greedy and seeded. A dozen
prompts by default; `make equality` runs fifty (DIPTYCH_EQUALITY_PROMPTS).
"""

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest

from diptych_contracts.ids import new_incarnation, new_request_id
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import Deadlines, Forced, Mode, Request
from diptych_contracts.sampling import Sampling, Stopping
from diptych_kvlink.links import KINDS, LinkSettings, offered
from diptych_testkit.builders import a_request
from diptych_testkit.bus_client import BusClient
from diptych_testkit.live_model import bare_engine, codec
from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]

N_PROMPTS = int(os.environ.get("DIPTYCH_EQUALITY_PROMPTS", "12"))
CROWD = 9
ANSWER_TOKENS = 16
UNHURRIED = Deadlines(first_token_s=600.0)
"""A crowd of long prompts is about 7,000 tokens to prefill, on a machine that may be busy."""
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=0.8, top_p=0.95, seed=20261129),
}
Expected = dict[tuple[int, str], list[int]]
"""(number of the prompt, name of the sampling) → the bare engine's answer."""
EDGES = [1, 63, 64, 65, 127, 128, 129]
LONG = [192, 193, 256, 300, 511, 512, 700, 1000, 1500]
TEXTS = [
    "The lighthouse keeper wrote in his log every evening, whatever the weather. ",
    "Der Leuchtturmwärter schrieb jeden Abend in sein Buch. ",
    "Le gardien du phare écrivait chaque soir dans son journal. ",
    "灯台守は毎晩日誌を書いた。",
    "Смотритель маяка каждый вечер писал в журнал. ",
    "def light(lamp):\n    return lamp.on and not lamp.broken\n",
]


@dataclass(frozen=True)
class Path:
    """One way a request can go."""

    mode: Mode
    link: str | None

    @property
    def forced(self) -> Forced:
        return Forced(mode=self.mode, link=self.link)  # type: ignore[arg-type]


LINKS = offered(LinkSettings(kinds=KINDS))
"""Over NIXL too where it is installed (make nixl)."""
PATHS = [Path(Mode.LOCAL, None), *(Path(Mode.REMOTE, link) for link in LINKS)]


def prompts() -> list[tuple[int, ...]]:
    """Edges of blocks first, then long ones; several languages; every third shares a prefix."""
    rng = Random(1)
    lengths = (EDGES + LONG) if len(EDGES) + 5 < N_PROMPTS else EDGES + LONG[:5]
    found = []
    for number in range(N_PROMPTS):
        length = lengths[number] if number < len(lengths) else rng.randint(2, 400)
        text = TEXTS[0] if number % 3 == 0 else TEXTS[number % len(TEXTS)]
        ids = codec().encode(f"{'' if number % 3 == 0 else number}{text}" * (length // 6 + 2))
        found.append(tuple(ids[:length]))
    return found


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What one bare engine in one process says."""
    bare = bare_engine()
    try:
        yield {
            (number, name): bare.answer(prompt, ANSWER_TOKENS, sampling)
            for number, prompt in enumerate(prompts())
            for name, sampling in SAMPLINGS.items()
        }
    finally:
        bare.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    live = LiveStack(tmp_path_factory.mktemp("stack"))
    try:
        live.start_all()
        yield live
    finally:
        live.close()


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[BusClient]:
    bus = await stack.join()
    client = BusClient(bus, new_incarnation("gateway", Random()))
    await client.start()
    yield client
    await client.close()
    await bus.close()


def a_try(number: int, name: str, path: Path) -> Request:
    return a_request(
        new_request_id(Random()),
        model=MODEL,
        prompt_ids=prompts()[number],
        sampling=SAMPLINGS[name],
        stopping=Stopping(max_tokens=ANSWER_TOKENS),
        deadlines=UNHURRIED,
        forced=path.forced,
    )


async def check(
    client: BusClient,
    tries: list[tuple[int, str, Path]],
    expected: Expected,
) -> int:
    """Send `tries` together; each must give the bare engine's answer. Gives cached tokens."""
    requests = [a_try(*each) for each in tries]
    for request in requests:
        await client.send(request)
    cached_tokens = 0
    for (number, name, path), request in zip(tries, requests, strict=True):
        end = await client.ended(request.request_id, timeout_s=300)
        assert end.reason in (EndReason.STOP, EndReason.LENGTH), end
        assert end.report is not None
        assert (end.report.mode, end.report.link) == (path.mode, path.link or "")
        assert client.delivered[request.request_id] == expected[number, name], (number, name, path)
        cached_tokens += end.report.cached_tokens
    return cached_tokens


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.mode}-{path.link}")
async def test_in_a_crowd_and_from_a_cached_prefix(
    path: Path, client: BusClient, expected: Expected
) -> None:
    tries = [(n, name, path) for n, name in product(range(N_PROMPTS), SAMPLINGS)]
    cached_tokens = 0
    for start in range(0, len(tries), CROWD):
        crowd = tries[start : start + CROWD]
        cached_tokens += await check(client, crowd, expected)
    assert cached_tokens > 0


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.mode}-{path.link}")
async def test_alone(path: Path, client: BusClient, expected: Expected) -> None:
    for number, name in product(range(0, N_PROMPTS, 3), SAMPLINGS):
        await check(client, [(number, name, path)], expected)


async def test_seeds_decide(client: BusClient) -> None:
    prompt = prompts()[7]
    answers = {}
    for tag, seed in (("one", 1), ("again", 1), ("two", 2)):
        request = a_request(
            new_request_id(Random()),
            model=MODEL,
            prompt_ids=prompt,
            sampling=Sampling(temperature=1.0, seed=seed),
            stopping=Stopping(max_tokens=ANSWER_TOKENS),
        )
        answers[tag] = request.request_id
        await client.send(request)
    for request_id in answers.values():
        await client.ended(request_id)
    told = {tag: client.delivered[request_id] for tag, request_id in answers.items()}
    assert told["one"] == told["again"]
    assert told["one"] != told["two"]
