"""The words in which the table is written: what is done with subjects, streams and buckets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = "{{name()}}"
"""The process's own name."""
ANY = "*"
"""Every name."""


@dataclass(frozen=True, slots=True)
class StreamUse:
    """What a role does with a stream, beside publishing on its subjects."""

    reads: bool = False
    """Any message of it."""
    erases: bool = False
    """Single messages."""
    pulls: str = ""
    """The shared consumer that it takes messages from."""


@dataclass(frozen=True, slots=True)
class BucketUse:
    """What a role does with a key-value bucket; keys as patterns."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    """Also deletes."""
    watches: bool = False
    """All of it."""
    lists: bool = False
    """All of it, once: as a watch, but without a consumer, so that nothing is sent elsewhere."""


@dataclass(frozen=True, slots=True)
class ObjectsUse:
    """What a role does with an object bucket."""

    reads: bool = False
    writes: bool = False
    """Also deletes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Everything a role may do."""

    publishes: tuple[str, ...] = ()
    """Subjects, requests among them."""
    hears: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    """Hears, and publishes one answer to each request."""
    streams: Mapping[str, StreamUse] = field(default_factory=dict)
    buckets: Mapping[str, BucketUse] = field(default_factory=dict)
    objects: Mapping[str, ObjectsUse] = field(default_factory=dict)
    creates: bool = False
    """Streams and buckets, all of those declared."""


READ = BucketUse(reads=(ANY,))
WATCH = BucketUse(reads=(ANY,), watches=True)
CHANGE = BucketUse(reads=(ANY,), writes=(ANY,))
KEEP = BucketUse(reads=(ANY,), writes=(ANY,), watches=True)
"""Everything."""
