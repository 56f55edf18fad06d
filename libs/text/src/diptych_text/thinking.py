"""Reasoning between two markers, before the answer proper."""

from collections.abc import Callable

from diptych_text.parts import PartList
from diptych_text.scanning import Markers, Source, Steps, blanks, literal, until

Parser = Callable[[Source, PartList], Steps[None]]

THINK, THINK_END = "<think>", "</think>"
BRACKET, BRACKET_END = "[THINK]", "[/THINK]"


def thinking(opening: str, closing: str, *, begun: bool, then: Parser) -> Parser:
    """A parser of reasoning, and of the rest by `then`.

    Args:
        opening: Reasoning begins with it.
        closing: And ends with this; without it everything is reasoning.
        begun: Whether the prompt ended inside of reasoning: then `opening` need not come.
        then: Reads what follows.
    """
    ends = Markers(closing)

    def parse(source: Source, out: PartList) -> Steps[None]:
        source.keep()
        yield from blanks(source)
        opened = yield from literal(source, opening)
        if opened or begun:
            source.release()
            marker = yield from until(source, ends, out.reasoning)
            source.at += len(marker)
            out.edge()
        else:
            source.back()
        yield from then(source, out)

    return parse
