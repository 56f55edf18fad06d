"""How fake servers that stream tokens behave, and misbehave."""

from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_engine.over_http.contract import Contract
from diptych_testkit.fake_engines.strict_server import Exchange, Handlers, StrictServer
from diptych_testkit.fake_engines.toy_tokens import ToyTokens, forced_by


@dataclass(kw_only=True)
class Habits:
    """What both kinds have in common."""

    vocab_size: int = 1000
    first_token: int = 1
    step_s: float = 0.0
    eos_at: int | None = None
    tokens_per_event: int = 1
    error_after: int | None = None
    """So many tokens, then an error event, then `[DONE]`."""
    cut_after: int | None = None
    """So many tokens, then `[DONE]`, without a reason to finish."""
    die_after: int | None = None
    reject: int = 0
    """The status it answers before its engine sees a request."""
    hangs: bool = False
    """Its web server answers, its engine does nothing."""

    def tokens(self, ids: list[int], sampling: dict[str, Any], *, seed: str) -> ToyTokens:
        """What it answers to `ids`; `seed` is its own word for the seed."""
        return ToyTokens(
            ids,
            vocab_size=self.vocab_size,
            first_token=self.first_token,
            forced=forced_by(sampling.get("logit_bias", {})),
            temperature=sampling.get("temperature", 1.0),
            seed=sampling.get(seed, 0),
            eos_at=None if sampling.get("ignore_eos") else self.eos_at,
        )


class TokenServer(StrictServer):
    """A server of an engine.

    Args:
        contract: What it takes and gives.
        handlers: What it does, by the name of the call.
        habits: How it behaves; may change while it runs.
        error: What it says where its engine fails.
    """

    def __init__(
        self, contract: Contract, handlers: Handlers, habits: Habits, error: dict[str, Any]
    ) -> None:
        super().__init__(contract, handlers)
        self._how = habits
        self._error = error
        self.running = 0

    async def misbehaves(self, exchange: Exchange, made: int) -> bool:
        """Break an answer of `made` tokens off, if it is a habit; whether it is."""
        how = self._how
        if how.die_after is not None and made > how.die_after:
            self._break()
            return True
        if how.error_after is not None and made > how.error_after:
            await exchange.raw_event(msgspec.json.encode({"error": self._error}))
            await exchange.done()
            return True
        if how.cut_after is not None and made > how.cut_after:
            await exchange.done()
            return True
        return False
