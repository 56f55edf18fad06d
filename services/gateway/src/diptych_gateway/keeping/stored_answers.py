"""What a response came to, made from its journal: what a stream of it says, token by token."""

from diptych_contracts.responses import StoredAnswer
from diptych_gateway.answering.chance_trail import ChanceTrail
from diptych_gateway.answering.logprob_objects import logprobs_json
from diptych_gateway.keeping.archive import deltas
from diptych_policy.journal import RequestView
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec


def stored_answer(
    view: RequestView, text: AnswerText, codec: TextCodec, *, ended_unix_s: int
) -> StoredAnswer:
    """The answer of a journal that has its end; with logprobs if `view` has them."""
    assert view.end is not None
    if view.logprobs is None:
        pieces = tuple(deltas(text, view.token_ids))
        logprobs: tuple[bytes, ...] = ()
    else:
        pieces, logprobs = _told(view, text, codec)
    return StoredAnswer(
        deltas=pieces,
        tokens=len(view.token_ids),
        end=view.end,
        ended_unix_s=ended_unix_s,
        logprobs=logprobs,
    )


def _told(
    view: RequestView, text: AnswerText, codec: TextCodec
) -> tuple[tuple[str, ...], tuple[bytes, ...]]:
    trail, pieces, logprobs = ChanceTrail(text.spelling), [], []
    for token, chances in zip(view.token_ids, view.logprobs or (), strict=True):
        trail.push(token, chances)
        if piece := text.push((token,)):
            pieces.append(piece)
            logprobs.append(logprobs_json(codec, trail.shown(piece)))
    rest = text.finish()
    told = () if text.stopped else trail.rest()
    if rest or told:
        pieces.append(rest)
        logprobs.append(logprobs_json(codec, told))
    return tuple(pieces), tuple(logprobs)
