"""Within which numbers one can choose a token: the gateway and the engines judge by the same."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberSpan:
    """A range of numbers; `open_low` leaves its lower end out. NaN is in none."""

    low: float
    high: float | None = None
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        low_ok = value > self.low if self.open_low else value >= self.low
        return low_ok and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"{'more than' if self.open_low else 'from'} {self.low}, up to {self.high}"


SAMPLING_SPANS = {
    "temperature": NumberSpan(0, 2),
    "top_p": NumberSpan(0, 1, open_low=True),
    "top_k": NumberSpan(0, 2**31 - 1),
    "min_p": NumberSpan(0, 1),
    "presence_penalty": NumberSpan(-2, 2),
    "frequency_penalty": NumberSpan(-2, 2),
    "repetition_penalty": NumberSpan(0.01, 2),  # 1e-300 would make infinities of logits
}
"""Of the fields of a `Sampling`."""
LOGIT_BIAS_SPAN = NumberSpan(-100, 100)
