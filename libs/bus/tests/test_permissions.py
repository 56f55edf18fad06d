"""For each role every subject, stream and bucket is tried on a real server: its table, no more."""

import asyncio
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.permissions import page
from diptych_bus.permissions.granting import permissions
from diptych_bus.permissions.table import RIGHTS
from diptych_contracts import streams, subjects
from diptych_identity.roles import Role
from diptych_testkit.guarded_nats import GuardedNats, guarded_nats

OTHER = "other-000000000000"
_VERBS = {"kv": ("reserve", "release"), "embed": ("job", "cancel")}
_EVENTS = ("request_ended", "member_drained", "member_lost")
_NAMES = ("escape", "unescape")


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedNats]:
    with guarded_nats(tmp_path_factory.mktemp("nats"), unbound=None) as nats:
        yield nats


def product_subjects(me: str) -> list[str]:
    """Everything `contracts.subjects` builds, about `me`, about somebody else, and its patterns."""
    found: list[str] = []
    for name, build in inspect.getmembers(subjects, inspect.isfunction):
        if build.__module__ != subjects.__name__ or name in _NAMES:
            continue
        choices = [
            _choices(name, parameter, me) for parameter in inspect.signature(build).parameters
        ]
        found += [build(*values) for values in itertools.product(*choices)]
    for value in vars(subjects).values():
        if isinstance(value, str) and value.endswith(("*", ">")):
            found.append(value)
    return list(dict.fromkeys([*found, *subjects.EVERYTHING]))


def _choices(builder: str, parameter: str, me: str) -> tuple[str, ...]:
    if parameter == "verb":
        return _VERBS[builder]
    if builder == "event":
        return _EVENTS
    if builder == "undelivered":
        return {"stream": (streams.REQUESTS.name,), "consumer": ("sched",)}[parameter]
    return (me, OTHER)


def stream_names() -> dict[str, tuple[str, ...]]:
    """Every stream, and some of its subjects' patterns."""
    named = {spec.name: spec.subjects for spec in streams.STREAMS}
    named |= {f"KV_{spec.name}": (f"$KV.{spec.name}.>",) for spec in streams.BUCKETS}
    named |= {
        f"OBJ_{spec.name}": (f"$O.{spec.name}.C.x", f"$O.{spec.name}.M.x")
        for spec in streams.OBJECT_BUCKETS
    }
    return named


def stored_keys(me: str) -> list[str]:
    keys = [me, OTHER, "governor", "key.1", "a.b.c"]
    found = [f"$KV.{spec.name}.{key}" for spec in streams.BUCKETS for key in keys]
    for spec in streams.OBJECT_BUCKETS:
        found += [f"$O.{spec.name}.C.x", f"$O.{spec.name}.M.x"]
    return found


def api_subjects(me: str) -> list[str]:
    """What JetStream's API offers, for every stream."""
    found = ["INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.CREATE.mine", "ACCOUNT.PURGE.x"]
    for name, filters in stream_names().items():
        found += [
            f"{verb}.{name}"
            for verb in (
                *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.INFO"),
                *("STREAM.MSG.GET", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE"),
                *("STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "DIRECT.GET"),
                *("CONSUMER.LIST", "CONSUMER.NAMES", "CONSUMER.CREATE"),
            )
        ]
        for consumer in ("sched", "mine"):
            found += [
                f"{verb}.{name}.{consumer}"
                for verb in (
                    *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.INFO"),
                    *("CONSUMER.DELETE", "CONSUMER.MSG.NEXT", "CONSUMER.PAUSE"),
                )
            ]
        for subject in (*filters, ">"):
            found.append(f"DIRECT.GET.{name}.{subject}")
            found.append(f"CONSUMER.CREATE.{name}.mine.{subject}")
    for key in stored_keys(me):
        stream = ("KV_" if key.startswith("$KV") else "OBJ_") + key.split(".")[1]
        found.append(f"DIRECT.GET.{stream}.{key}")
        found.append(f"CONSUMER.CREATE.{stream}.mine.{key}")
    return [f"$JS.API.{subject}" for subject in found]


def published(me: str) -> list[str]:
    found = [*product_subjects(me), *stored_keys(me), *api_subjects(me)]
    found += [f"$JS.{kind}.{name}.sched.1" for kind in ("ACK", "FC") for name in stream_names()]
    found += [f"_INBOX.{me}.x", f"_INBOX.{OTHER}.x", "_INBOX.x", "anything", "$SYS.REQ.USER.INFO"]
    return list(dict.fromkeys(found))


def heard(me: str) -> list[str]:
    found = [*product_subjects(me), *stored_keys(me), ">", "*", "$JS.>", "$JS.API.>", "$SYS.>"]
    found += [f"_INBOX.{who}.>" for who in (me, OTHER, "*")] + [
        "_INBOX.>",
        "_R_.>",
        "$KV.>",
        "$O.>",
    ]
    return list(dict.fromkeys([*found, "$JS.EVENT.ADVISORY.STREAM.DELETED.*"]))


def covers(pattern: str, subject: str) -> bool:
    """Whether `pattern` allows `subject`, as the server sees it: a wildcard there is any token.

    So `load.*` allows to hear `load.>` too: no subject has more tokens where a pattern ends in `*`.
    """
    wanted, seen = pattern.split("."), subject.split(".")
    for n, token in enumerate(wanted):
        if token == ">":
            return len(seen) > n
        if n >= len(seen) or (token != "*" and token != seen[n]):
            return False
    return len(wanted) == len(seen)


def allowed(patterns: tuple[str, ...], subject: str, me: str) -> bool:
    return any(covers(pattern.replace("{{name()}}", me), subject) for pattern in patterns)


class Refusals:
    def __init__(self) -> None:
        self.told: list[str] = []

    async def hear(self, err: Exception) -> None:
        self.told.append(str(err).lower())

    def of(self, what: str, tried: list[str]) -> set[str]:
        return {one for one in tried if any(f'{what} "{one.lower()}"' in t for t in self.told)}


async def ignore(_: Msg) -> None:
    pass


async def closed(client: IdentifiedClient, me: str) -> None:
    """Close it once the server has read everything: a message of its own is back."""
    back = asyncio.Event()

    async def hear(_: Msg) -> None:
        back.set()

    await client.subscribe(f"_INBOX.{me}.back", cb=hear)
    await client.publish(f"_INBOX.{me}.back", b"")
    async with asyncio.timeout(60):
        await back.wait()
    await client.close()


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_publish_its_table_and_nothing_else(nats: GuardedNats, role: Role) -> None:
    me = f"{role.value}-00000000000a"
    refusals = Refusals()
    client = await nats.client(role, me, error_cb=refusals.hear)
    tried = published(me)
    for subject in tried:
        await client.publish(subject, b"")
    await closed(client, me)
    granted = permissions(RIGHTS[role]).publish
    assert refusals.of("publish to", tried) == {s for s in tried if not allowed(granted, s, me)}


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_hear_its_table_and_nothing_else(nats: GuardedNats, role: Role) -> None:
    me = f"{role.value}-00000000000b"
    refusals = Refusals()
    client = await nats.client(role, me, error_cb=refusals.hear)
    tried = heard(me)
    for subject in tried:
        await client.subscribe(subject, cb=ignore)
    await closed(client, me)
    granted = permissions(RIGHTS[role]).subscribe
    assert refusals.of("subscription to", tried) == {
        s for s in tried if not allowed(granted, s, me)
    }


def test_every_subject_of_the_product_has_somebody_to_say_and_to_hear_it() -> None:
    """A new subject is nobody's until it is in the table."""
    me = "me-000000000000"
    unheard = ("event.", "dead.", "request.", "token.")  # stored
    for subject in product_subjects(me):
        if subject.startswith("$") or subject.endswith(("*", ">")):
            continue
        spoken = subject.replace(OTHER, me)
        said = subject.startswith("live.") or any(
            allowed(permissions(rights).publish, spoken, me) for rights in RIGHTS.values()
        )
        got = subject.startswith(unheard) or any(
            allowed(permissions(rights).subscribe, spoken, me) for rights in RIGHTS.values()
        )
        assert said, f"nobody publishes {subject}"
        assert got, f"nobody hears {subject}"


def test_every_stream_and_bucket_is_somebody_s() -> None:
    used = {name for rights in RIGHTS.values() for name in rights.streams}
    assert used == {spec.name for spec in streams.STREAMS}
    used = {name for rights in RIGHTS.values() for name in rights.buckets}
    assert used == {spec.name for spec in streams.BUCKETS}
    used = {name for rights in RIGHTS.values() for name in rights.objects}
    assert used == {spec.name for spec in streams.OBJECT_BUCKETS}


def may_publish(role: Role, subject: str, me: str = "me") -> bool:
    return allowed(permissions(RIGHTS[role]).publish, subject, me)


def may_hear(role: Role, subject: str, me: str = "me") -> bool:
    return allowed(permissions(RIGHTS[role]).subscribe, subject, me)


@pytest.mark.parametrize(
    "subject",
    [
        *("power.me", "power.other", "control.me", "control.other", "cancel.other", "job.other"),
        *("kv.other.reserve", "embed.other.job", "request.interactive.m", "dead.request.x"),
        *("beat.other", "load.other", "blocks.other", "queue.me", "attended.g", "current.other"),
        *("$KV.workers.other", "$KV.config.power", "$KV.keys.key.1", "$KV.leases.governor"),
        *("$KV.requests.r", "$KV.usage.d", "$KV.responses.r", "$O.prompts.C.x", "$O.prompts.M.x"),
        *("event.request_ended", "event.set_point_changed", "live.g"),
        *("$JS.API.DIRECT.GET.KV_requests.$KV.requests.r", "$JS.API.DIRECT.GET.KV_keys"),
        *("$JS.API.DIRECT.GET.KV_responses.$KV.responses.r", "$JS.API.DIRECT.GET.REQUESTS"),
        *("$JS.API.DIRECT.GET.TOKENS", "$JS.API.STREAM.MSG.GET.REQUESTS"),
        *("$JS.API.CONSUMER.CREATE.KV_workers.x.$KV.workers.>", "$JS.API.CONSUMER.CREATE.TOKENS.x"),
        *("$JS.API.STREAM.DELETE.TOKENS", "$JS.API.STREAM.PURGE.TOKENS"),
    ],
)
def test_a_decode_worker_may_not(subject: str) -> None:
    """Said by hand, whatever the table comes to say."""
    assert not may_publish(Role.DECODE_WORKER, subject)


@pytest.mark.parametrize(
    "subject",
    [
        *(
            "job.other",
            "job.*",
            "cancel.other",
            "kv.other.reserve",
            "embed.other.job",
            "power.other",
        ),
        *("control.other", "token.g", "live.g", "live.*", "request.*.*", "_INBOX.other.>", ">"),
        *("$KV.keys.>", "$KV.requests.>", "$O.prompts.>", "event.>", "_INBOX.>"),
    ],
)
def test_a_worker_may_not_hear(subject: str) -> None:
    for role in (Role.DECODE_WORKER, Role.PREFILL_WORKER):
        assert not may_hear(role, subject)


def test_power_is_the_governor_s_word_only() -> None:
    assert [role for role in Role if may_publish(role, "power.x")] == [Role.POWER_GOVERNOR]


def test_keys_are_written_by_operators_only() -> None:
    assert [role for role in Role if may_publish(role, "$KV.keys.key.1")] == [Role.OPERATOR]


def test_nobody_hears_another_s_inbox() -> None:
    for role in Role:
        assert may_hear(role, "_INBOX.me.x")
        assert not any(may_hear(role, s) for s in ("_INBOX.other.x", "_INBOX.>", "_INBOX.*.x", ">"))


def test_only_a_supervisor_creates_and_nobody_deletes_streams() -> None:
    for role in Role:
        assert may_publish(role, "$JS.API.STREAM.CREATE.TOKENS") == (role is Role.SUPERVISOR)
        for verb in ("DELETE", "UPDATE", "SNAPSHOT", "RESTORE"):
            assert not may_publish(role, f"$JS.API.STREAM.{verb}.TOKENS")


def test_the_page_says_what_the_table_says() -> None:
    """`python -m diptych_bus.permissions.page` writes it."""
    path = Path(__file__).parents[3] / "docs/security.md"
    assert path.read_text() == page.written(path.read_text())
