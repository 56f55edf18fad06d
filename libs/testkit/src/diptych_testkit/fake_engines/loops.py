"""What the loop around an adapter needs in a test."""

from collections.abc import Callable

from diptych_contracts.sampling import Stopping
from diptych_engine.request_watch import WatchTimes
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

QUICK = WatchTimes(health_s=0.1, answer_s=60.0, stats_s=0.05)


def answer_texts(codec: TextCodec) -> Callable[[Stopping], AnswerText]:
    """What finds stop strings in an answer."""

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    return answer_text
