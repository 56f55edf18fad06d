"""What a client of the older completions is sent: `text_completion`, whole or in pieces."""

from collections.abc import Sequence
from typing import Any

import msgspec

from diptych_gateway.answering.answers import ChunkWriter, Delta, finish_reason
from diptych_gateway.answering.chance_trail import TokenChance
from diptych_gateway.answering.logprob_objects import CompletionLogprobs, completion_logprobs
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_text.codec import TextCodec

PREFIX = "cmpl-"
KIND = "text_completion"


class TextChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | msgspec.Raw | None = None
    finish_reason: str | None = None


def text_choice(
    stream: AnswerStream,
    pieces: Sequence[Shown],
    *,
    codec: TextCodec | None,
    index: int = 0,
    echo: str = "",
) -> TextChoice:
    """One whole answer, after its prompt if that is `echo`; with `codec`, its logprobs are told."""
    told = [chance for shown in pieces for chance in shown.logprobs]
    return TextChoice(
        text=echo + "".join(shown.text for shown in pieces),
        index=index,
        logprobs=None if codec is None else completion_logprobs(codec, told),
        finish_reason=finish_reason(stream),
    )


class TextWriter(ChunkWriter):
    """Server-sent events of one answer, in the older form.

    Args:
        heading: As for `ChunkWriter`, as are all the others.
        echo: The prompt, said before the answer.
        more: What else `ChunkWriter` takes.
    """

    kind = KIND

    def __init__(self, *heading: Any, echo: str = "", **more: Any) -> None:
        super().__init__(*heading, **more)
        self._echo = echo

    def start(self) -> list[bytes]:
        """The prompt, if it is to be echoed."""
        return self.delta(-1, Delta(content=self._echo)) if self._echo else []

    def logprobs(self, codec: TextCodec, told: Sequence[TokenChance]) -> msgspec.Struct:
        """What a chunk says of the tokens of its text."""
        return completion_logprobs(codec, told)

    def said(
        self, delta: Delta, finish_reason: str | None, logprobs: msgspec.Raw | None
    ) -> msgspec.Struct:
        """What a chunk says of its choice."""
        text = delta.content or ""
        return TextChoice(
            text=text, index=self.choice, logprobs=logprobs, finish_reason=finish_reason
        )
