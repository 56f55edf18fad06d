"""The answers nothing disturbed: a bare engine's, computed before the run and kept for the next."""

import hashlib
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from diptych_testkit.bare_engine import BareEngine, Question
from diptych_testkit.chaos.asking import LONGEST_TOKENS, Api, Ask, Prompt
from diptych_testkit.chaos.checking import Expected, Piece
from diptych_testkit.live_stack import MODEL, gguf_path
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_worker.assembling import load_engine, read_card
from diptych_worker.settings import WorkerSettings

EngineName = Literal["llamacpp", "sim"]

_AT_ONCE = 8


class Undisturbed:
    """The catalogue's answers.

    Args:
        prompts: The catalogue.
        engine: As that of the stack's workers.
    """

    def __init__(self, prompts: Sequence[Prompt], *, engine: EngineName) -> None:
        self._engine = engine
        self._settings = _settings(engine)
        self._card = read_card(self._settings)
        self._codec = TextCodec.from_card(self._card)
        self._questions = [
            Question(self._codec.encode_chat(p.messages), LONGEST_TOKENS + 1, p.sampling)
            for p in prompts
        ]
        self._answers: list[list[int]] = []

    def compute(self) -> bool:
        """Have the answers; False if they were remembered. Blocks for up to minutes."""
        path = self._remembered_at()
        if path.is_file():
            self._answers = msgspec.msgpack.decode(path.read_bytes(), type=list[list[int]])
            return False
        bare = BareEngine(load_engine(self._settings, self._card))
        try:
            for first in range(0, len(self._questions), _AT_ONCE):
                self._answers += bare.answers(self._questions[first : first + _AT_ONCE])
        finally:
            bare.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.msgpack.encode(self._answers))
        return True

    def token_ids(self, ask: Ask) -> list[int]:
        """The tokens of the answer to `ask`."""
        return self._answers[ask.prompt][: ask.max_tokens]

    def expected(self, ask: Ask) -> Expected:
        """The pieces of text of the answer to `ask`, placed as its API places them."""
        whole, ids = self._answers[ask.prompt], self.token_ids(ask)
        stopped = len(whole) <= LONGEST_TOKENS and len(whole) < ask.max_tokens
        pieces = self._pieces(ids)
        if ask.api is Api.RESPONSES:
            pieces = [Piece(place, piece.text) for place, piece in enumerate(pieces)]
        return Expected(tuple(pieces), "stop" if stopped else "length")

    def _pieces(self, ids: Sequence[int]) -> list[Piece]:
        text = AnswerText(self._codec)
        pieces = [Piece(index, text.push((token,))) for index, token in enumerate(ids)]
        pieces.append(Piece(len(ids), text.finish()))  # held back: half a character at the limit
        return [piece for piece in pieces if piece.text]

    def _remembered_at(self) -> Path:
        build = metadata.version("xllamacpp") if self._engine == "llamacpp" else "sim"
        of = msgspec.json.encode(
            [
                build,
                self._card.fingerprint,
                [(q.prompt_ids, q.max_tokens, q.sampling) for q in self._questions],
            ]
        )
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "diptych/chaos" / f"{hashlib.sha256(of).hexdigest()[:32]}.msgpack"


def _settings(engine: EngineName) -> WorkerSettings:
    if engine == "sim":
        return WorkerSettings(model=MODEL, engine="sim", kv_tokens=4096)
    return WorkerSettings(model_path=gguf_path(), model=MODEL, threads=2, kv_tokens=4096)
