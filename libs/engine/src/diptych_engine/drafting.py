"""Goes on with a sequence within one step: tokens that a draft found right (speculation, MTP).

What is sampled is what would have been sampled one step at a time: a draft changes when a token
comes, never which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from diptych_contracts.errors import DiptychError
from diptych_engine.failing import failed
from diptych_engine.port import NewTokens, SequenceKey, StepEngine, StepInput, StepNews
from diptych_engine.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class Drafting:
    """Takes what drafts got right into a step's news.

    Args:
        engine: Drafts and computes.
        sequences: Those that run.
        free: Told of one that leaves, and how many tokens of it have KV.
        advance: Told of one that goes on: tokens with KV, and how many were sampled beyond.
    """

    engine: StepEngine
    sequences: Mapping[SequenceKey, LiveSequence]
    free: Callable[[SequenceKey, int], None]
    advance: Callable[[SequenceKey, int, int], None]

    def take(self, news: list[StepNews], tokens: dict[SequenceKey, int]) -> tuple[int, int]:
        """Add what was right to `news` and `tokens`; gives drafts seen and accepted.

        Last in the step: it uses the engine again, and so ends the life of the step's logits.
        """
        drafts = accepted = 0
        if not self.engine.draft_tokens:
            return drafts, accepted
        for place, said in enumerate(news):
            sequence = self.sequences.get(said.key)
            if sequence is None or not isinstance(said, NewTokens):
                continue
            drafts += self.engine.draft_tokens
            try:
                news[place] = more = go_on(self.engine, sequence, said)
            except DiptychError as err:
                self.free(said.key, 0)
                news.append(failed(said.key, err))
                continue
            count = len(more.token_ids) - len(said.token_ids)
            accepted += count
            tokens[said.key] += count
            computed = len(sequence.tokens) - 1
            if more.finish is not None:
                self.free(said.key, computed)
            else:
                self.advance(said.key, computed, count)
        return drafts, accepted


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
