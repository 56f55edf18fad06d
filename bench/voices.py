"""What voices cost: microseconds per streamed token, where a gateway folds its journal.

Frames of one engine step for 32 sequences are decoded and folded, as `InFlight.dispatch` does, with
requests that have a secret and with requests that have none. Alternating, best of several rounds.

    python bench/voices.py [rounds]
"""

import sys
import time

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import JournalEntry, TokenEntry, TokenFrame
from diptych_contracts.wire import decode, encode
from diptych_policy.journal import RequestView, parts
from diptych_policy.voices import attempt_voice

SEQUENCES = 32
STEPS = 400


def secret(number: int) -> bytes:
    """Of a request; any bytes will do."""
    return number.to_bytes(16, "big")


def frames(*, voiced: bool) -> list[bytes]:
    """Every step's frame, as the bus carries it."""
    voices = [attempt_voice(secret(n), 1) if voiced else b"" for n in range(1, SEQUENCES + 1)]
    return [
        encode(
            TokenFrame(
                worker=Incarnation("decode-worker-00000000aaaa"),
                entries=tuple(
                    TokenEntry(
                        request_id=RequestId(f"{n:032x}"),
                        attempt=1,
                        index=step,
                        token_ids=(step,),
                        voice=voice,
                    )
                    for n, voice in enumerate(voices, start=1)
                ),
            )
        )
        for step in range(STEPS)
    ]


def us_per_token(data: list[bytes], *, voiced: bool) -> float:
    """One round: everything decoded and folded."""
    views = {
        RequestId(f"{n:032x}"): RequestView(
            RequestId(f"{n:032x}"), secret=secret(n) if voiced else b""
        )
        for n in range(1, SEQUENCES + 1)
    }
    began_s = time.process_time()
    for frame in data:
        for part in parts(decode(frame, JournalEntry)):
            views[part.request_id].apply(part)
    took_s = time.process_time() - began_s
    assert all(len(view.token_ids) == STEPS for view in views.values())
    return took_s / (SEQUENCES * STEPS) * 1e6


def main(rounds: int = 30) -> None:
    """Print the best round of each."""
    plain, voiced = frames(voiced=False), frames(voiced=True)
    best = {"without": float("inf"), "with": float("inf")}
    for _ in range(rounds):
        best["without"] = min(best["without"], us_per_token(plain, voiced=False))
        best["with"] = min(best["with"], us_per_token(voiced, voiced=True))
    size = (len(voiced[0]) - len(plain[0])) / SEQUENCES
    print(f"decode and fold: {best['without']:.3f} us per token without voices,")
    print(f"                 {best['with']:.3f} us with; {size:.0f} bytes more per entry")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
