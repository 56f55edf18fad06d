"""Goes on with a sequence within one step: tokens that a draft found right (speculation, MTP).

What is sampled is what would have been sampled one step at a time: a draft changes when a token
comes, never which.
"""

from dataclasses import replace

from diptych_engine.port import NewTokens, StepEngine, StepInput
from diptych_engine.sequence import LiveSequence


def go_on(engine: StepEngine, sequence: LiveSequence, news: NewTokens) -> NewTokens:
    """`news` and the tokens after it whose drafts were right.

    Raises:
        Permanent: as `LiveSequence.extend`.
    """
    for _ in range(engine.accepted_drafts(sequence.seq)):
        if news.finish is not None:
            break
        at = len(sequence.tokens) - 1
        run = StepInput(sequence.seq, at, sequence.tokens[at:], want_logits=True)
        row = engine.step([run])[0]
        assert row is not None, "logits were asked for"
        more = sequence.extend(row)
        news = replace(
            news,
            token_ids=news.token_ids + more.token_ids,
            finish=more.finish,
            logprobs=news.logprobs + more.logprobs,
        )
    return news
