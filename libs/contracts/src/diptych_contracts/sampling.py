"""How to choose the next token, and when to stop."""

from typing import Annotated, Literal

from msgspec import Meta

from diptych_contracts.wire import Message


class Grammar(Message, frozen=True, kw_only=True, tag="grammar.1"):
    """What an answer must match, token by token."""

    kind: Literal["json_schema", "lark"]
    text: str
    """A JSON schema, or a grammar in llguidance's form of Lark."""


class Sampling(Message, frozen=True, kw_only=True, tag="sampling.1"):
    """Sampling parameters of one request.

    Randomness is a pure function of (`seed`, token index), so the same seed gives the same text
    whatever else is in the batch, and after a recovery.
    """

    temperature: float = 1.0
    """0 is greedy. At most 2."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely one's probability."""
    seed: int = 0
    """64 bits; the gateway draws one if the client gave none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token generated so far; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and answer; in [0.01, 2]:
    smaller ones make infinities of logits."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), in [-100, 100]; before the penalties."""
    top_logprobs: int | None = None
    """How many likely tokens are told beside each chosen one; None: no logprobs at all. They are of
    the model's own distribution, before bias, penalties, temperature and grammar."""
    grammar: Grammar | None = None
    """Tokens it does not allow are never chosen."""


class Stopping(Message, frozen=True, kw_only=True, tag="stopping.1"):
    """When an answer ends."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Most tokens to generate, counted from the first one of the answer. Checked when decoded: with
    another number a worker would promise more, or fewer, KV cells than there are."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are not part of it; at most 4."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens (for benchmarks)."""
