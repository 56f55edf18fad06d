"""The table in the server's words: which subjects a role's calls of the port come to.

What adapter `jetstream` publishes to JetStream's API for each call of the port stands here a second
time; `tests/parity` runs that adapter with these rights and no others.
"""

from collections.abc import Iterator, Mapping

from diptych_bus.jetstream.answers import API
from diptych_bus.jetstream.declaring import bucket_stream, object_stream
from diptych_bus.jetstream.store_identity import DELETED
from diptych_bus.permissions.rights import ANY, NAME, BucketUse, ObjectsUse, Rights, StreamUse
from diptych_bus.permissions.table import RIGHTS
from diptych_contracts.streams import BUCKETS, OBJECT_BUCKETS, STREAMS
from diptych_identity.claims import Permissions
from diptych_identity.roles import Role

ANSWER_S = 120.0
"""An answer later than this is waited for by nobody (embedding is the longest)."""
_INBOX = f"_INBOX.{NAME}.>"


def table(rights: Mapping[Role, Rights] = RIGHTS) -> dict[Role, Permissions]:
    """What every role may do, for an `Authority`."""
    return {role: permissions(of) for role, of in rights.items()}


def permissions(rights: Rights) -> Permissions:
    """What `rights` come to."""
    return Permissions(
        publish=_once(_published(rights)),
        subscribe=_once((_INBOX, DELETED, *rights.hears, *rights.answers)),
        answers_within_s=ANSWER_S if rights.answers else 0.0,
    )


def needed_streams(rights: Rights) -> frozenset[str]:
    """The streams a role touches: those whose loss it must notice."""
    if rights.creates:
        return ALL
    names = set(rights.streams)
    names |= {bucket_stream(bucket) for bucket in rights.buckets}
    names |= {object_stream(bucket) for bucket in rights.objects}
    return frozenset(names)


ALL = frozenset(
    [spec.name for spec in STREAMS]
    + [bucket_stream(spec.name) for spec in BUCKETS]
    + [object_stream(spec.name) for spec in OBJECT_BUCKETS]
)


def _once(subjects: "Iterator[str] | tuple[str, ...]") -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects))


def _published(rights: Rights) -> Iterator[str]:
    yield _INBOX  # `Connection.settle`
    yield from rights.publishes
    yield f"{API}.STREAM.LIST"
    for name in sorted(needed_streams(rights)):
        yield f"{API}.STREAM.INFO.{name}"
        if rights.creates:
            yield f"{API}.STREAM.CREATE.{name}"
    if rights.creates:
        yield f"{API}.INFO"
    for name, stream in rights.streams.items():
        yield from _stream(name, stream)
    for name, bucket in rights.buckets.items():
        yield from _bucket(name, bucket)
    for name, objects in rights.objects.items():
        yield from _objects(name, objects)


def _stream(name: str, use: StreamUse) -> Iterator[str]:
    if use.reads:
        yield f"{API}.DIRECT.GET.{name}"
        yield f"{API}.DIRECT.GET.{name}.>"
    if use.erases:
        yield f"{API}.STREAM.MSG.DELETE.{name}"
    if use.pulls:
        yield f"{API}.CONSUMER.INFO.{name}.{use.pulls}"
        yield f"{API}.CONSUMER.CREATE.{name}.{use.pulls}"
        yield f"{API}.CONSUMER.MSG.NEXT.{name}.{use.pulls}"
        yield f"$JS.ACK.{name}.{use.pulls}.>"


def _bucket(name: str, use: BucketUse) -> Iterator[str]:
    stream, prefix = bucket_stream(name), f"$KV.{name}."
    for key in use.reads:
        yield f"{API}.DIRECT.GET.{stream}.{prefix}{_whole(key)}"
    for key in use.writes:
        yield prefix + _whole(key)
    if use.lists:
        yield f"{API}.DIRECT.GET.{stream}"
    if use.watches:
        yield f"{API}.CONSUMER.CREATE.{stream}.*.{prefix}>"
        yield f"{API}.CONSUMER.DELETE.{stream}.*"
        yield f"$JS.FC.{stream}.>"


def _objects(name: str, use: ObjectsUse) -> Iterator[str]:
    stream = object_stream(name)
    yield f"{API}.DIRECT.GET.{stream}.$O.{name}.M.*"
    if use.reads:
        yield f"{API}.DIRECT.GET.{stream}"
    if use.writes:
        yield f"$O.{name}.C.*"
        yield f"$O.{name}.M.*"
        yield f"{API}.STREAM.PURGE.{stream}"


def _whole(key: str) -> str:
    """A key may have several tokens."""
    return ">" if key == ANY else key
