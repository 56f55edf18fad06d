"""Which prefixes a worker has cached: hashes of KV blocks, made by `policy.prefixes`.

They are hints for routing. A worker numbers its events; who misses one asks for a snapshot.
"""

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message


class BlocksChanged(Message, frozen=True, kw_only=True, tag="blocks_changed.1"):
    """Cached blocks came and went: `blocks.<worker>`. The first event of a worker has id 1."""

    worker: Incarnation
    event_id: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class BlocksQuery(Message, frozen=True, kw_only=True, tag="blocks_query.1"):
    """What have you cached? Asked on `control.<worker>`."""

    asker: Incarnation


class BlocksSnapshot(Message, frozen=True, kw_only=True, tag="blocks_snapshot.1"):
    """All cached blocks, after event `event_id`."""

    worker: Incarnation
    event_id: int
    stored: tuple[int, ...] = ()
