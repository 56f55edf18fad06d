"""The weights of live tests in the test's own process: card, codec and a bare engine.

Read on first use, not on import: tests are collected on machines that have no weights.
"""

import dataclasses
from functools import cache

from diptych_contracts.cards import ModelCard
from diptych_testkit.bare_engine import BareEngine
from diptych_testkit.live_stack import MODEL, gguf_path
from diptych_text.codec import TextCodec
from diptych_worker.assembling import load_engine, read_card
from diptych_worker.settings import WorkerSettings


@cache
def settings() -> WorkerSettings:
    """Settings of an engine like those of the stack's workers."""
    return WorkerSettings(model_path=gguf_path(), model=MODEL, threads=1, kv_tokens=4096)


@cache
def card() -> ModelCard:
    """The model's card."""
    return read_card(settings())


@cache
def codec() -> TextCodec:
    """Its tokenizer and template."""
    return TextCodec.from_card(card())


def bare_engine(*, prefix_cache: bool = True) -> BareEngine:
    """One engine in this process; to be closed."""
    own = dataclasses.replace(settings(), prefix_cache=prefix_cache)
    return BareEngine(load_engine(own, card()))
