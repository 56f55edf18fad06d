"""What makes two prompts begin alike: hashes of their full blocks, each over all blocks before it.

So the hash of block n names the whole prefix up to its end. The chain begins with tenant and model:
what two tenants send never has a hash in common.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych_contracts.requests import Request

_HASH_BYTES = 8


def block_hashes(
    tenant: str, model_base: str, token_ids: Sequence[int], block_tokens: int
) -> tuple[int, ...]:
    """One 64-bit hash per full block of `token_ids`; about 3 us each for 64 tokens.

    Args:
        tenant: Whose prompt it is.
        model_base: `Fingerprint.base` of the model.
        token_ids: The prompt; a last block that is not full has no hash, nor has any from the first
            one with an id of more than 31 bits on: no model has such a token, and no worker takes
            the prompt.
        block_tokens: Size of a block.
    """
    names = (tenant.encode(), model_base.encode())
    salt = b"".join(len(name).to_bytes(8, "little") + name for name in names)
    digest = hashlib.blake2b(salt, digest_size=_HASH_BYTES).digest()
    packer = struct.Struct(f"<{block_tokens}i")
    hashes: list[int] = []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        try:
            block = packer.pack(*token_ids[end - block_tokens : end])
        except struct.error:
            break
        digest = hashlib.blake2b(digest + block, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The full blocks of one sequence."""

    tenant: str
    token_ids: tuple[int, ...]
    hashes: tuple[int, ...]

    @classmethod
    def of(
        cls, tenant: str, model_base: str, token_ids: Sequence[int], block_tokens: int
    ) -> "Prefix":
        """The full blocks of `token_ids`."""
        hashes = block_hashes(tenant, model_base, token_ids, block_tokens)
        return cls(tenant, tuple(token_ids[: len(hashes) * block_tokens]), hashes)


@dataclass(slots=True)
class PromptBlocks:
    """A prompt's hashes, computed when first asked for."""

    tenant: str
    token_ids: Sequence[int]
    _known: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> "PromptBlocks":
        """The blocks of a request's prompt; of one that is kept elsewhere those it names."""
        ref = request.prompt
        if ref is None:
            return cls(request.tenant, request.prompt_ids)
        return cls(request.tenant, (), {(ref.model_base, ref.block_tokens): ref.block_hashes})

    def hashes(self, model_base: str, block_tokens: int) -> tuple[int, ...]:
        """As `block_hashes` gives."""
        key = (model_base, block_tokens)
        if key not in self._known:
            self._known[key] = block_hashes(self.tenant, model_base, self.token_ids, block_tokens)
        return self._known[key]
