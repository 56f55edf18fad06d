"""gpt-oss's channels: analysis is reasoning, final is text, commentary to a function is a call.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
<|start|>assistant<|channel|>final<|message|>…<|return|>
"""

import re

from diptych_text.call_objects import MAX_NAME_CHARS, arguments
from diptych_text.parts import PartList
from diptych_text.scanning import Markers, Source, Steps, captured, until

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_HEAD = Markers(MESSAGE, END, CALL, RETURN)
_BODY = Markers(END, CALL, RETURN, START)


def harmony(source: Source, out: PartList) -> Steps[None]:
    """Messages, each with a head that says whose and what it is."""
    while True:
        head, marker = yield from captured(source, _HEAD)
        source.at += len(marker)
        if not marker:
            out.text("" if CHANNEL in head else head.removeprefix(START))
            return
        if marker != MESSAGE:
            continue
        channel, to = _CHANNEL.search(head), _RECIPIENT.search(head)
        if to and len(to[1]) <= MAX_NAME_CHARS:
            out.call(to[1])
            yield from arguments(source, out)
            marker = yield from until(source, _BODY, _unheard)
        elif channel and channel[1] == "analysis":
            marker = yield from until(source, _BODY, out.reasoning)
        else:
            marker = yield from until(source, _BODY, out.text)
        out.edge()
        source.at += len(marker) if marker != START else 0


def _unheard(text: str) -> None:
    """Nothing follows arguments."""
