import msgspec

from diptych_cli.kv_tiers import COLUMNS, collected, headline, row, table
from diptych_contracts import subjects
from diptych_contracts.control import TiersAsk, TiersSnapshot
from diptych_contracts.fleet import Role
from diptych_contracts.ids import Incarnation
from diptych_contracts.tiers import TierUsage
from diptych_testkit.small_fleet import small_fleet

HOST = TierUsage(
    name="host",
    entries=1200,
    bytes=1_771_296_000,
    budget_bytes=2 * 1024**3,
    hits=31,
    misses=4,
    stored=1250,
    dropped=2,
    read_bytes_per_s=5.2e9,
)
REDIS = TierUsage(name="redis://kv:6379", errors=3, away="connection refused", forgetting=1)
P1 = TiersSnapshot(
    worker=Incarnation("p1"),
    tiers=(HOST, REDIS),
    restored=12,
    restored_tokens=18_432,
    late=1,
    dropped=3,
)
D1 = TiersSnapshot(worker=Incarnation("d1"))


def test_a_tier_is_a_row_and_what_is_not_known_is_no_number() -> None:
    assert len(row(HOST)) == len(row(REDIS)) == len(COLUMNS)
    told = dict(zip(COLUMNS, row(HOST), strict=True))
    assert (told["blocks"], told["bytes"], told["budget"]) == ("1,200", "1.6 GiB", "2.0 GiB")
    assert (told["read MB/s"], told["away"]) == ("5,200", "")
    told = dict(zip(COLUMNS, row(REDIS), strict=True))
    assert (told["blocks"], told["bytes"], told["budget"]) == ("?", "?", "its own")
    assert told["away"] == "connection refused; 1 tenants to be forgotten"


def test_a_worker_says_what_its_tiers_were_good_for() -> None:
    assert headline(P1) == (
        "p1  12 prompts began with 18,432 tokens restored; 1 reads were too late; "
        "3 blocks found no room on their way"
    )
    assert "no tiers" in headline(D1)
    assert table([P1, D1]).renderables


def test_json_has_every_number() -> None:
    (tier, _) = msgspec.json.decode(msgspec.json.encode([P1, D1]))[0]["tiers"]
    assert (tier["name"], tier["entries"], tier["hits"]) == ("host", 1200, 31)


async def test_every_worker_is_asked() -> None:
    async with small_fleet() as fleet:
        fleet.worker("d1", Role.DECODE)
        await fleet.ready()
        (answer,) = await collected(fleet.bus)
        assert answer == TiersSnapshot(worker=fleet.incarnation("d1"))
        subject = subjects.control(fleet.incarnation("d1"))
        assert await fleet.bus.request(subject, TiersAsk(), TiersSnapshot, timeout_s=5) == answer
