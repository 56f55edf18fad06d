"""Which codec a transfer's blocks get: the one that loses least of those that are in time.

Blocks leave while the next chunk computes, so what a slow link costs is what has not crossed when
prefill ends. The worst of that is reckoned: all of it crosses after. A codec that makes KV smaller
takes time on either side, so on a fast link `raw` wins by itself, whatever may be used.

Nothing is chosen for a link that has not been measured: its first transfer is `raw`, and is the
measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diptych_contracts.codecs import CODECS, RAW
from diptych_contracts.errors import Permanent

AUTO = "auto"
_NEW = 0.3
"""Share of a new measurement in the average."""
_LEAST_BYTES = 65_536
"""What is smaller says how long an exchange takes, not how wide a link is."""
_WORTH_FRAC = 0.9
"""A codec must save a tenth of the time, or it is not worth its work."""


@dataclass(frozen=True, slots=True)
class CodecPace:
    """What a codec does to KV: measured on one core (`bench/codecs.py`)."""

    smaller: float
    """Bytes before, by bytes after."""
    encode_bytes_s: float
    """Of KV before it is encoded, as `decode_bytes_s`."""
    decode_bytes_s: float


PACES: Mapping[str, CodecPace] = {
    "zstd": CodecPace(1.16, 0.7e9, 1.3e9),
    "int8": CodecPace(2.35, 0.27e9, 0.39e9),
    "fp8": CodecPace(2.79, 0.29e9, 0.89e9),
    "delta": CodecPace(3.6, 0.24e9, 0.38e9),
}


@dataclass(slots=True)
class Bandwidths:
    """How fast each link has been lately, in bytes that crossed per second."""

    _known: dict[str, float] = field(default_factory=dict)
    most: int = 256

    def crossed(self, link: str, n_bytes: int, took_s: float) -> None:
        """A transfer over `link` (a kind, and whose) took `took_s` for sending alone."""
        if n_bytes < _LEAST_BYTES or took_s <= 0:
            return
        seen, before = n_bytes / took_s, self._known.pop(link, None)
        self._known[link] = seen if before is None else before + _NEW * (seen - before)
        while len(self._known) > self.most:
            del self._known[next(iter(self._known))]

    def bytes_s(self, link: str) -> float | None:
        """None: not measured."""
        return self._known.get(link)

    @property
    def slowest_bytes_s(self) -> float:
        """Of all that were measured; 0: none was."""
        return min(self._known.values(), default=0.0)


def check_setting(setting: str, allowed: Sequence[str]) -> None:
    """Raise `Permanent` unless a worker can be told so."""
    for codec in (setting, *allowed):
        if codec not in CODECS and not (codec == setting == AUTO and AUTO not in allowed):
            raise Permanent(
                f"unknown KV codec {codec!r}: expected one of {', '.join(CODECS)}"
                f" (or {AUTO}, which is no codec, for what is sent)"
            )


def hand_off_s(codec: str, n_bytes: int, bytes_s: float) -> float:
    """How long `n_bytes` of KV take over a link of `bytes_s`, encoded so."""
    pace = PACES.get(codec)
    if pace is None:
        return n_bytes / bytes_s
    return n_bytes * (
        1 / pace.encode_bytes_s + 1 / (pace.smaller * bytes_s) + 1 / pace.decode_bytes_s
    )


def choose_codec(
    setting: str,
    allowed: Sequence[str],
    *,
    n_bytes: int,
    bytes_s: float | None,
    budget_s: float,
) -> str:
    """The codec to ask for.

    Args:
        setting: A codec's name, which is then the one, or `auto`.
        allowed: What may be used by `auto`; `raw` always may.
        n_bytes: KV of the whole context.
        bytes_s: Of the link; None: not measured.
        budget_s: What of the first token's time the hand-off may take.
    """
    if setting != AUTO:
        return setting
    if bytes_s is None or bytes_s <= 0:
        return RAW
    raw_s = hand_off_s(RAW, n_bytes, bytes_s)
    worth = [
        codec
        for codec in CODECS
        if codec in allowed
        and codec != RAW
        and hand_off_s(codec, n_bytes, bytes_s) < _WORTH_FRAC * raw_s
    ]
    if raw_s <= budget_s or not worth:
        return RAW
    for codec in worth:  # Those that lose least come first.
        if hand_off_s(codec, n_bytes, bytes_s) <= budget_s:
            return codec
    return min(worth, key=lambda codec: hand_off_s(codec, n_bytes, bytes_s))


class CodecChoice:
    """What one writing worker asks for, by its settings and what it has measured.

    Args:
        setting: See `choose_codec`, as `allowed`, `budget_s`.
        block: Bytes and tokens of a block of its KV.
    """

    def __init__(
        self,
        setting: str = RAW,
        allowed: Sequence[str] = (RAW,),
        *,
        budget_s: float = 0.0,
        block: tuple[int, int] = (1, 1),
    ) -> None:
        self._setting = setting
        self._allowed = tuple(allowed)
        self._budget_s = budget_s
        self._token_bytes = block[0] / block[1]
        self._bandwidths = Bandwidths()

    def codec(self, link: str, tokens: int) -> str:
        """For a context of `tokens` over `link` (a kind, and whose)."""
        return choose_codec(
            self._setting,
            self._allowed,
            n_bytes=round(tokens * self._token_bytes),
            bytes_s=self._bandwidths.bytes_s(link),
            budget_s=self._budget_s,
        )

    def crossed(self, link: str, n_bytes: int, took_s: float) -> None:
        """A transfer over `link` is over."""
        self._bandwidths.crossed(link, n_bytes, took_s)

    @property
    def slowest_bytes_s(self) -> float:
        """What hand-offs from here move at, at least; 0: not measured."""
        return self._bandwidths.slowest_bytes_s
