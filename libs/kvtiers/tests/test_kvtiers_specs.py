import pytest

from diptych_kvtiers.specs import MAX_TIERS, TierSpec, parse_tier, parse_tiers, shown

GIB = 1024**3


def test_the_tiers_of_the_documentation() -> None:
    text = "host:2GiB, disk:20GiB:/kv/x,redis://h:6379,memcached://h:11211,s3://b/p,bus:1GiB"
    specs = parse_tiers(text.split(","))
    assert [(spec.kind, spec.where, spec.budget_bytes) for spec in specs] == [
        ("host", "", 2 * GIB),
        ("disk", "/kv/x", 20 * GIB),
        ("redis", "redis://h:6379", None),
        ("memcached", "memcached://h:11211", None),
        ("object", "s3://b/p", None),
        ("bus", "", GIB),
    ]
    assert parse_tiers([]) == ()


@pytest.mark.parametrize(
    ("text", "budget_bytes"),
    [
        ("host:1MiB", 1024**2),
        ("host:500MB", 500_000_000),
        ("host:3000000", 3_000_000),
        ("host:3000000B", 3_000_000),
        ("host:2048KiB", 2 * 1024**2),
        ("host:1TiB", 1024 * GIB),
    ],
)
def test_sizes(text: str, budget_bytes: int) -> None:
    assert parse_tier(text).budget_bytes == budget_bytes


def test_options_of_urls() -> None:
    assert parse_tier("s3://b/p/?budget=1TiB&timeout=2.5&endpoint=http://h:9000&region=eu") == (
        TierSpec(
            kind="object",
            where="s3://b/p",
            budget_bytes=1024 * GIB,
            timeout_s=2.5,
            endpoint="http://h:9000",
            region="eu",
        )
    )
    spec = parse_tier("rediss://u:secret@[::1]:6379/2?ttl=12h&timeout=0.2")
    assert (spec.where, spec.ttl_s) == ("rediss://u:secret@[::1]:6379/2", 43_200)
    assert "secret" not in repr(spec)
    assert shown(spec.where) == "rediss://[::1]:6379/2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host", "expected a size"),
        ("host:", "expected a size"),
        ("host:2GX", "expected a size from 1MiB to 1024TiB, got '2GX'"),
        ("host:2GiB:/x", "expected a tier such as"),
        ("host:1KiB", "expected a size"),
        ("host:-1GiB", "expected a size"),
        ("host:٣GiB", "expected a size"),
        ("host:10iB", "expected a size"),
        ("host:2000TiB", "expected a size"),
        ("disk:1GiB", "expected a tier such as"),
        ("disk:1GiB:relative", "expected a tier such as"),
        ("bus:9GiB", "the bus keeps 4 GiB at most"),
        ("tape:1GiB", "expected a tier such as host:SIZE"),
        ("http://x/y", "expected a tier such as"),
        ("s3://", "expected a bucket"),
        ("s3://b/../x", "a plain prefix"),
        ("s3://key:secret@b/x", "a plain prefix"),
        ("file://host/x", "expected file:///path"),
        ("file:///", "expected file:///path"),
        ("redis://", "expected a host"),
        ("redis://h:x", "expected a URL"),
        ("redis://h:99999", "expected a URL"),
        ("redis://h/name", "expected the number of a database"),
        ("memcached://h", "expected memcached://HOST:PORT"),
        ("memcached://h:1/x", "expected memcached://HOST:PORT"),
        ("redis://h?budget=1GiB", "expected the options ttl, timeout"),
        ("redis://h?ttl=1h&ttl=2h", "once each"),
        ("redis://h?ttl", "expected options such as|expected a time to live"),
        ("redis://h?ttl=1y", "expected a time to live"),
        ("redis://h?ttl=31d", "expected a time to live"),
        ("redis://h?timeout=0", "expected a timeout"),
        ("redis://h?timeout=1e9", "expected a timeout"),
        ("redis://h#x", "expected no fragment"),
        ("redis://h?x y", "expected no fragment, space"),
        ("s3://b?endpoint=ftp://x", "expected an endpoint"),
        ("s3://" + "b" * 3000, "characters at most"),
        ("", "expected a tier such as"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_tier(text)


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:hush@h:x",
        "redis://u:hush@h/name",
        "redis://u:hush@h?a=b",
        "redis://u:hush@[h",
        "/u:hush@h:6379.5",
        "u:hush@h",
    ],
)
def test_no_error_holds_a_password(text: str) -> None:
    with pytest.raises(ValueError, match="expected") as told:
        parse_tier(text)
    assert "hush" not in str(told.value)


def test_each_tier_once_and_not_too_many() -> None:
    with pytest.raises(ValueError, match="expected each tier once, got redis redis://h twice"):
        parse_tiers(["redis://u:hush@h", "redis://u:hush@h"])
    with pytest.raises(ValueError, match=f"expected at most {MAX_TIERS} tiers"):
        parse_tiers([f"disk:1GiB:/x{n}" for n in range(MAX_TIERS + 1)])
