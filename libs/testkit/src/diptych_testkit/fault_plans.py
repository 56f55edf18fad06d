"""Seeded plans of a small fleet's bad day: what is asked of it, and what befalls it.

Pure: a case and a seed give the same plan everywhere. `CASES` names the faults one by one;
`everything` mixes them. In every second seed engines and workers can do more
(`member_builds`), and what is asked goes on where others ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from diptych_contracts.requests import Forced, KvPath, Mode
from diptych_contracts.sampling import Sampling
from diptych_testkit.member_builds import PLAIN, Build, chosen
from diptych_testkit.toy_engine import toy_answer

SCHEDULERS = ("s1", "s2")
PREFILLS = ("p1", "p2")
DECODES = ("d1", "d2")
WORKERS = (*PREFILLS, *DECODES)
MEMBERS = (*SCHEDULERS, *WORKERS)
GATEWAYS = ("g1", "g2")
CLIENT = ""
"""The name of the gateway's clock."""
LOAD_S = 3.0
"""Requests come, and faults begin, within this time."""
HOUR_MS = 3_600_000
TENANTS = ("default", "other")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    forced: Forced
    cancel_after_s: float | None = None
    tenant: str = TENANTS[0]


@dataclass(frozen=True, slots=True)
class Read:
    """One response, read through gateways until its end."""

    name: str
    at_s: float
    text: str
    max_tokens: int
    leave_after_s: float | None = None
    """When its client goes for good, if it does."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A member dies; another takes its place after a while."""

    at_s: float
    member: str
    again_after_s: float


@dataclass(frozen=True, slots=True)
class Freeze:
    """A member stands still, and goes on as if nothing had been."""

    at_s: float
    member: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A member does not reach the bus."""

    at_s: float
    member: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Away:
    """The bus is away, as if killed and restarted."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Storm:
    """KV links are slow, and break."""

    at_s: float
    for_s: float
    latency_s: float
    bytes_per_s: float
    break_frac: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """A tenant is purged from what engines keep."""

    at_s: float
    tenant: str


Strike = Kill | Freeze | Cut | Away | Storm | Forget


@dataclass(frozen=True, slots=True)
class Noise:
    """What goes wrong with messages all the time; fractions in [0, 1]."""

    drop_frac: float = 0.0
    duplicate_frac: float = 0.0
    delay_frac: float = 0.0
    delay_s: float = 0.05
    lost_ack_frac: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One bad day."""

    case: str
    seed: int
    asks: tuple[Ask, ...]
    reads: tuple[Read, ...] = ()
    """Instead of `asks`: only with them there are gateways."""
    strikes: tuple[Strike, ...] = ()
    noise: Noise = Noise()
    skew_ms: dict[str, int] = field(default_factory=dict)
    """How far members' wall clocks are ahead."""
    prefill: Build = PLAIN
    decode: Build = PLAIN


def plan(case: str, seed: int) -> Plan:
    """The plan of `case` that `seed` gives."""
    rng = Random(f"{case}/{seed}")
    calm = Plan(case, seed, tuple(_ask(rng, number) for number in range(rng.randint(8, 14))))
    what = CASES[case](calm, rng)
    return _abler(what, Random(f"able/{case}/{seed}")) if seed % 2 and what.asks else what


def _abler(what: Plan, rng: Random) -> Plan:
    """The same day of a fleet that keeps KV, drafts or parks, as `rng` says."""
    parks = rng.random() < 0.4
    prefill, decode = chosen(rng, parks=parks)
    firsts = [rng.randint(1, 600) for _ in range(3)]
    asks = tuple(_going_on(ask, rng, firsts, parks=parks) for ask in what.asks)
    purges = tuple(Forget(_when(rng), rng.choice(TENANTS)) for _ in range(rng.randint(0, 2)))
    strikes = (*what.strikes, *purges)
    return replace(what, asks=asks, strikes=strikes, prefill=prefill, decode=decode)


def _going_on(ask: Ask, rng: Random, firsts: list[int], *, parks: bool) -> Ask:
    """`ask` as a turn of one of a few conversations."""
    first = rng.choice(firsts)
    ids = tuple(range(first, first + rng.choice((1, 16, 17, 33, 64, 80, 129, 200))))
    if rng.random() < 0.4:
        ids = (*ids, *toy_answer(ids, rng.randint(1, 40)))
    path = KvPath.DIS_CPU if parks and rng.random() < 0.5 else None
    mode = Mode.REMOTE if path or rng.random() < 0.6 else ask.forced.mode
    forced = Forced(mode=mode, link=ask.forced.link, path=path)
    return replace(ask, prompt_ids=ids, forced=forced, tenant=rng.choice(TENANTS))


def _ask(rng: Random, number: int) -> Ask:
    first = rng.randint(1, 600)
    sampled = rng.random() < 0.4
    return Ask(
        name=f"r{number}",
        at_s=rng.uniform(0, LOAD_S),
        prompt_ids=tuple(range(first, first + _length(rng, 300))),
        max_tokens=_length(rng, 120),
        sampling=Sampling(temperature=1.0 if sampled else 0.0, seed=rng.getrandbits(63)),
        forced=Forced(
            mode=rng.choice((None, None, None, Mode.REMOTE, Mode.LOCAL)),
            link=rng.choice((None, None, "shm", "tcp")),
        ),
        cancel_after_s=rng.uniform(0, 1.5) if rng.random() < 0.25 else None,
    )


def _length(rng: Random, most: int) -> int:
    """Mostly short, sometimes long, with the edges of a block among them."""
    usual = (1, 63, 64, 65, 2)
    return rng.choice(usual) if rng.random() < 0.2 else 1 + int(most * rng.random() ** 2)


def _lost_worker(calm: Plan, rng: Random) -> Plan:
    victims = [rng.choice(WORKERS) for _ in range(rng.randint(1, 2))]
    return replace(calm, strikes=tuple(_kill(rng, v) for v in dict.fromkeys(victims)))


def _lost_scheduler(calm: Plan, rng: Random) -> Plan:
    victims = rng.sample(SCHEDULERS, rng.randint(1, 2))
    return replace(calm, strikes=tuple(_kill(rng, victim) for victim in victims))


def _kill(rng: Random, victim: str) -> Kill:
    return Kill(_when(rng), victim, again_after_s=rng.uniform(0.1, 3.0))


def _frozen(calm: Plan, rng: Random) -> Plan:
    victims = rng.sample(MEMBERS, rng.randint(1, 2))
    return replace(
        calm,
        strikes=tuple(
            Freeze(_when(rng), v, rng.choice((0.3, 0.9, 1.5, 4.0, 9.0))) for v in victims
        ),
    )


def _duplicate(calm: Plan, rng: Random) -> Plan:
    return replace(calm, noise=Noise(duplicate_frac=rng.uniform(0.1, 0.5)))


def _reorder(calm: Plan, rng: Random) -> Plan:
    return replace(
        calm,
        noise=Noise(delay_frac=rng.uniform(0.1, 0.5), delay_s=rng.choice((0.02, 0.1, 0.4))),
    )


def _dropped(calm: Plan, rng: Random) -> Plan:
    return replace(calm, noise=Noise(drop_frac=rng.uniform(0.05, 0.2)))


def _lost_ack(calm: Plan, rng: Random) -> Plan:
    return replace(calm, noise=Noise(lost_ack_frac=rng.uniform(0.05, 0.3)))


def _lost_gateway(calm: Plan, rng: Random) -> Plan:
    reads = tuple(_read(rng, number) for number in range(rng.randint(5, 8)))
    others = _lost_worker(calm, rng) if rng.random() < 0.3 else calm
    struck = [_struck_gateway(rng, name) for name in rng.sample(GATEWAYS, rng.randint(1, 2))]
    return replace(calm, asks=(), reads=reads, strikes=(*others.strikes, *struck))


def _read(rng: Random, number: int) -> Read:
    words = ("Hello", "world", "and", "the", "system", "user", "ä", "🙂", "<|im_end|>")
    return Read(
        name=f"r{number}",
        at_s=rng.uniform(0, LOAD_S),
        text=" ".join(rng.choice(words) for _ in range(rng.randint(1, 30))),
        max_tokens=rng.randint(1, 320),
        leave_after_s=rng.uniform(0, 1.5) if rng.random() < 0.2 else None,
    )


def _struck_gateway(rng: Random, name: str) -> Strike:
    for_s = rng.choice((0.3, 1.5, 4.0, 14.0))
    strikes: tuple[Strike, ...] = (
        _kill(rng, name),
        _kill(rng, name),
        Freeze(_when(rng), name, for_s),
        Cut(_when(rng), name, for_s),
    )
    return rng.choice(strikes)


def _slow_link(calm: Plan, rng: Random) -> Plan:
    storm = Storm(
        at_s=_when(rng),
        for_s=rng.uniform(0.5, 6.0),
        latency_s=rng.choice((0.005, 0.1, 1.0)),
        bytes_per_s=rng.choice((200.0, 2_000.0, 50_000.0)),
        break_frac=rng.choice((0.0, 0.0, 0.3)),
    )
    return replace(calm, strikes=(storm,))


def _partition(calm: Plan, rng: Random) -> Plan:
    victims = rng.sample(MEMBERS, rng.randint(1, 2))
    return replace(
        calm,
        strikes=tuple(Cut(_when(rng), v, rng.choice((0.2, 0.8, 1.5, 4.0, 8.0))) for v in victims),
    )


def _bus_away(calm: Plan, rng: Random) -> Plan:
    return replace(calm, strikes=(Away(_when(rng), rng.choice((0.2, 1.0, 3.0, 10.0))),))


def _clock_skew(calm: Plan, rng: Random) -> Plan:
    skew_ms = {name: rng.randint(-2 * HOUR_MS, 2 * HOUR_MS) for name in (CLIENT, *MEMBERS)}
    loss = _lost_scheduler(calm, rng) if rng.random() < 0.5 else calm
    return replace(loss, skew_ms=skew_ms)


def _everything(calm: Plan, rng: Random) -> Plan:
    struck = [make(calm, rng) for make in rng.sample(_STRUCK, rng.randint(1, 3))]
    noise = Noise(
        drop_frac=rng.uniform(0, 0.05),
        duplicate_frac=rng.uniform(0, 0.2),
        delay_frac=rng.uniform(0, 0.2),
        lost_ack_frac=rng.uniform(0, 0.1),
    )
    strikes = _one_each([strike for one in struck for strike in one.strikes])
    return replace(_clock_skew(calm, rng), strikes=strikes, noise=noise)


def _one_each(strikes: list[Strike]) -> tuple[Strike, ...]:
    """A member is struck once: nobody thaws who is dead."""
    by_victim = {getattr(strike, "member", type(strike).__name__): strike for strike in strikes}
    return tuple(by_victim.values())


def _when(rng: Random) -> float:
    return rng.uniform(0.1, LOAD_S)


_STRUCK: tuple[Callable[[Plan, Random], Plan], ...] = (
    _lost_worker,
    _lost_scheduler,
    _frozen,
    _slow_link,
    _partition,
    _bus_away,
)

CASES: dict[str, Callable[[Plan, Random], Plan]] = {
    "lost_worker": _lost_worker,
    "lost_scheduler": _lost_scheduler,
    "lost_gateway": _lost_gateway,
    "frozen": _frozen,
    "duplicate": _duplicate,
    "reorder": _reorder,
    "dropped": _dropped,
    "lost_ack": _lost_ack,
    "slow_link": _slow_link,
    "partition": _partition,
    "bus_away": _bus_away,
    "clock_skew": _clock_skew,
    "everything": _everything,
}
