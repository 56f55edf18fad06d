"""The port through which cached prefixes are kept for KV that is still to come."""

from collections.abc import Hashable
from typing import Protocol

from diptych_policy.prefixes import Prefix


class PrefixPins(Protocol):
    """Cached prefixes that KV to come will follow. Methods are thread-safe and return at once."""

    def pin(self, key: Hashable, prefix: Prefix) -> int:
        """Keep the longest cached beginning of `prefix` for `key`; gives its blocks.

        Until the engine takes `key` (a `port.SequenceKey`) in, or `unpin`. Live sequences that find
        no other room, and a tenant that is forgotten, may end it sooner: then the work of `key`
        fails (`unverified_kv`).
        """
        ...

    def unpin(self, key: Hashable) -> None:
        """Nothing of `key` comes any more. Idempotent."""
        ...
