"""A model that costs nothing: the next token is a hash of all tokens before it.

Its "KV" of a position is the token there, so a block is its token ids, and wrong, missing or
misplaced KV changes the answer as it would with a real model. Misuse raises.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import Unverified
from diptych_engine.port import EngineSpec, KvBlock, StepInput

EOS_ID = 0
_HEADER = struct.Struct("<4sii")
_MAGIC = b"toy1"


def toy_next(history: Sequence[int], *, vocab_size: int = 1000) -> int:
    """The token a `ToyStepEngine` finds likeliest after `history`; never `EOS_ID`."""
    digest = hashlib.blake2b(np.asarray(history, "<i4").tobytes(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (vocab_size - 1)


def toy_answer(prompt_ids: Sequence[int], n_tokens: int, *, vocab_size: int = 1000) -> list[int]:
    """The greedy answer of `n_tokens` to a prompt."""
    tokens = list(prompt_ids)
    for _ in range(n_tokens):
        tokens.append(toy_next(tokens, vocab_size=vocab_size))
    return tokens[len(prompt_ids) :]


class ToyStepEngine:
    """A deterministic `StepEngine`.

    Args:
        vocab_size, block_tokens, context_tokens, kv_tokens, max_sequences: As in `EngineSpec`.
        eos_at: Length of a sequence after which end-of-text is the likeliest token; None: never.
        on_step: Called with each batch before it is computed: to wait, to count, to raise.
    """

    def __init__(  # noqa: PLR0913 - a test names the one it means
        self,
        *,
        vocab_size: int = 1000,
        block_tokens: int = 64,
        context_tokens: int = 4096,
        kv_tokens: int = 16_384,
        max_sequences: int = 16,
        eos_at: int | None = None,
        on_step: Callable[[Sequence[StepInput]], None] | None = None,
    ) -> None:
        self.spec = EngineSpec(
            engine="toy",
            fingerprint=Fingerprint(base="toy", weights="none"),
            layout=KvLayout(
                layout_id="toy-ids-v1",
                engine_build="toy-1",
                block_tokens=block_tokens,
                slot_bytes=_HEADER.size + 4 * block_tokens,
                dtype="i32",
            ),
            context_tokens=context_tokens,
            kv_tokens=kv_tokens,
            max_sequences=max_sequences,
            vocab_size=vocab_size,
            eos_ids=(EOS_ID,),
        )
        self.closed = False
        self.steps = 0
        self._eos_at = eos_at
        self._on_step = on_step
        self._kv: dict[int, list[int]] = {}

    @property
    def cells_used(self) -> int:
        """KV cells in use."""
        return sum(len(ids) for ids in self._kv.values())

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32] | None]:
        if self.closed:
            raise RuntimeError("step after close")
        if self._on_step is not None:
            self._on_step(inputs)
        if len({run.seq for run in inputs}) != len(inputs):
            raise ValueError("a sequence may stand in a step once")
        self.steps += 1
        return [self._run(run) for run in inputs]

    def _run(self, run: StepInput) -> NDArray[np.float32] | None:
        held = self._held(run.seq)
        if run.position != len(held) or not run.token_ids:
            raise ValueError(
                f"sequence {run.seq}: expected position {len(held)} and tokens, "
                f"got {run.position} and {len(run.token_ids)}"
            )
        if any(not 0 <= token < self.spec.vocab_size for token in run.token_ids):
            raise ValueError(f"sequence {run.seq}: a token beyond the vocabulary")
        held.extend(run.token_ids)
        if self.cells_used > self.spec.kv_tokens or len(held) > self.spec.context_tokens:
            raise ValueError(f"sequence {run.seq}: no room for {len(held)} tokens")
        return self._logits(held) if run.want_logits else None

    def _logits(self, history: list[int]) -> NDArray[np.float32]:
        likeliest = toy_next(history, vocab_size=self.spec.vocab_size)
        rng = np.random.Generator(np.random.Philox(likeliest))
        logits = rng.standard_normal(self.spec.vocab_size, np.float32)
        logits[EOS_ID] = -10.0
        if self._eos_at is not None and len(history) >= self._eos_at:
            likeliest = EOS_ID
        logits[likeliest] = 10.0
        return logits

    def export_block(self, seq: int, p0: int, p1: int, out: memoryview) -> int:
        ids = self._held(seq)[p0:p1]
        if not 0 <= p0 < p1 or len(ids) != p1 - p0:
            raise ValueError(f"sequence {seq} does not hold positions [{p0}, {p1})")
        data = _HEADER.pack(_MAGIC, p0, p1) + np.asarray(ids, "<i4").tobytes()
        out.cast("B")[: len(data)] = data
        return len(data)

    def import_block(self, seq: int, block: KvBlock) -> None:
        data = bytes(block.data)
        expected = _HEADER.pack(_MAGIC, block.p0, block.p1)
        if len(data) != len(expected) + 4 * (block.p1 - block.p0) or not data.startswith(expected):
            raise Unverified(f"KV of [{block.p0}, {block.p1}) is not what it should be")
        held = self._held(seq)
        if block.p0 != len(held):
            raise ValueError(f"sequence {seq} ends at {len(held)}, the block begins at {block.p0}")
        held.extend(np.frombuffer(data, "<i4", offset=len(expected)).tolist())

    def drop(self, seq: int) -> None:
        self._held(seq).clear()

    def close(self) -> None:
        self.closed = True

    def _held(self, seq: int) -> list[int]:
        if not 0 <= seq < self.spec.max_sequences:
            raise ValueError(f"sequence id {seq} is not in [0, {self.spec.max_sequences})")
        return self._kv.setdefault(seq, [])
