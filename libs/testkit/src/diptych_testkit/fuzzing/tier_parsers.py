"""What stores of KV blocks give back, and how their tiers are named."""

from functools import cache
from random import Random

from diptych_contracts.tiers import TierKey
from diptych_kvtiers.entry import Framer
from diptych_kvtiers.memcached_tier import _head
from diptych_kvtiers.specs import parse_tiers, shown
from diptych_testkit.fuzzing.bending import bent_bytes, bent_text
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.tier_suite import tier_block, tier_key

_KEYS = (None, bytes(32), bytes(range(32)))
_SPECS = (
    "host:2GiB",
    "disk:20GiB:/kv/x",
    "redis://u:hush@h:6379/1?ttl=24h&timeout=0.5",
    "memcached://h:11211",
    "s3://b/p?budget=1TiB&endpoint=http://h:9000&region=eu",
    "file:///x/y",
    "bus:1GiB",
)
_WORDS = (
    "://",
    ":",
    "?",
    "&",
    "=",
    "@",
    "[",
    "]",
    "//",
    "..",
    "%",
    "\0",
    "é",
    "٣",
    "GiB",
    "#",
    " ",
)


def parsers() -> list[Parser]:
    """All of them."""
    return [
        Parser(name="kv-entries", make=_entry, read=_opened, cases=5000),
        Parser(name="kv-parts", make=_part, read=_read_head, cases=20_000),
        Parser(name="kv-tier-names", make=_names, read=_parsed, told=(ValueError,), cases=5000),
    ]


@cache
def _good(n: int, fleet_key: bytes | None) -> bytes:
    return Framer(fleet_key).framed(tier_key(n), tier_block(n, 300))


def _entry(rng: Random) -> tuple[bytes, bytes | None, TierKey]:
    key, n = rng.choice(_KEYS), rng.randrange(2)
    data = _good(n, rng.choice((key, key, rng.choice(_KEYS))))
    if rng.random() < 0.5:
        data = bent_bytes(rng, data[:80]) + data[80:]
    elif rng.random() < 0.9:
        data = bent_bytes(rng, data, [_good(1 - n, key)])
    return data, key, tier_key(rng.choice((n, n, 1 - n)))


def _opened(case: tuple[bytes, bytes | None, TierKey]) -> None:
    """Whatever a store gives: the block itself, or nothing."""
    data, fleet_key, key = case
    block = bytes(Framer(fleet_key).opened(key, data))
    assert block == tier_block(0 if key == tier_key(0) else 1, 300), "a block that was never stored"


def _part(rng: Random) -> bytes:
    return bent_bytes(rng, b"DKM1" + bytes(rng.randrange(30)))


def _read_head(data: bytes) -> None:
    """As memcached gives it: sizes that memory must not follow."""
    head = _head(data)
    if head is not None:
        part_bytes, n_bytes, _ = head
        assert -(-n_bytes // part_bytes) <= 1 << 15


def _names(rng: Random) -> list[str]:
    specs = rng.sample(_SPECS, rng.randrange(1, len(_SPECS)))
    at = rng.randrange(len(specs))
    if rng.random() < 0.95:
        specs[at] = bent_text(rng, specs[at], _WORDS)
    return specs


def _parsed(specs: list[str]) -> None:
    all_of_it = "".join(specs)  # Without "@" behind it, it is no password.
    secret = 0 < all_of_it.count("u:hush") == all_of_it.count("u:hush@")
    try:
        parsed = parse_tiers(specs)
    except ValueError as err:
        if secret and "u:hush" in str(err):
            raise AssertionError(f"a password is told: {err}") from err
        raise
    for spec in parsed:
        assert "u:hush" not in repr(spec)
        assert "u:hush@" not in shown(spec.where)
        assert spec.kind != "disk" or spec.where.startswith("/")
