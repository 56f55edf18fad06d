"""The KV an engine says it keeps, under the names the fleet knows: hashes of tenant and tokens.

An engine names blocks in its own way and mostly does not say whose they are. Then they are those of
everybody who sent such a prompt lately: each of them had it computed.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import NamedTuple

from diptych_engine.port import EngineSpec, SequenceWork
from diptych_engine.request_port import KvCleared, KvEvent, KvRemoved, KvStored
from diptych_policy.prefixes import block_hashes

PROMPTS = 256
"""Prompts remembered, for events that do not say whose they are."""
BLOCKS = 1 << 18
"""Blocks known at most; beyond that the one told of longest ago is forgotten."""


_APART = "\x1f"
"""Between a tenant's name and its salt: no name has it."""


class _Block(NamedTuple):
    tenant: str
    hash: int


class Changed(NamedTuple):
    """Blocks, by hash, that came and went."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class ReusedBlocks:
    """The blocks of one engine. Used on one thread.

    Args:
        spec: The engine's.
        new_salt: Makes what a forgotten tenant's name goes on with.
        most_blocks: Engine blocks known at most.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        new_salt: Callable[[], str] = lambda: token_hex(4),
        most_blocks: int = BLOCKS,
    ) -> None:
        self._base = spec.fingerprint.base
        self._block_tokens = spec.layout.block_tokens
        self._new_salt = new_salt
        self._most_blocks = most_blocks
        self._salts: dict[str, str] = {}
        self._prompts: deque[tuple[str, Sequence[int]]] = deque(maxlen=PROMPTS)
        self._named: OrderedDict[int, frozenset[_Block]] = OrderedDict()
        """What each of the engine's blocks is to us."""
        self._holders: Counter[_Block] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def sent(self, work: SequenceWork) -> SequenceWork:
        """`work` as the engine is to know it: by a name its tenant has not been forgotten under."""
        self._prompts.append((work.tenant, work.prompt_ids))
        salt = self._salts.get(work.tenant)
        return work if salt is None else replace(work, tenant=f"{work.tenant}{_APART}{salt}")

    def told(self, event: KvEvent) -> Changed:
        """Take `event` in; gives what it means to the fleet."""
        match event:
            case KvStored():
                return self._store(event)
            case KvRemoved():
                return self._drop(event.engine_hashes)
            case KvCleared():
                return self._drop(tuple(self._named))

    def forget(self, tenant: str) -> Changed:
        """Let `tenant` find nothing of what it sent so far."""
        self._salts[tenant] = self._new_salt()
        left = [sent for sent in self._prompts if sent[0] != tenant]
        self._prompts = deque(left, maxlen=PROMPTS)
        removed = [block for block in self._holders if block.tenant == tenant]
        for name, blocks in list(self._named.items()):
            self._named[name] = frozenset(block for block in blocks if block.tenant != tenant)
        for block in removed:
            del self._holders[block]
        return Changed(removed=tuple(block.hash for block in removed))

    def _store(self, event: KvStored) -> Changed:
        size = self._block_tokens
        if len(event.token_ids) != len(event.engine_hashes) * size:
            return Changed()  # blocks of another size are nobody's to find
        stored: list[int] = []
        for tenant in self._whose(event):
            hashes = block_hashes(tenant, self._base, event.token_ids, size)
            for name, number in zip(event.engine_hashes, hashes, strict=True):
                block = _Block(tenant, number)
                known = self._named.pop(name, frozenset())
                self._named[name] = known | {block}
                if block not in known:
                    self._holders[block] += 1
                    if self._holders[block] == 1:
                        stored.append(number)
        spare = [name for name, _ in zip(self._named, range(self._too_many), strict=False)]
        return Changed(tuple(stored), self._drop(spare).removed)

    @property
    def _too_many(self) -> int:
        return max(0, len(self._named) - self._most_blocks)

    def _whose(self, event: KvStored) -> Iterable[str]:
        ids = event.token_ids
        if event.tenant is None:
            return {tenant for tenant, prompt in self._prompts if _begin_alike(prompt, ids)}
        tenant, _, salt = event.tenant.partition(_APART)
        return [tenant] if salt == self._salts.get(tenant, "") else []

    def _drop(self, names: Iterable[int]) -> Changed:
        removed: list[int] = []
        for name in names:
            for block in self._named.pop(name, ()):
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
                    removed.append(block.hash)
        return Changed(removed=tuple(removed))


def _begin_alike(prompt: Sequence[int], ids: tuple[int, ...]) -> bool:
    """Whether one is the beginning of the other; most differ in the first token."""
    n = min(len(prompt), len(ids))
    return n > 0 and prompt[0] == ids[0] and tuple(prompt[:n]) == ids[:n]
