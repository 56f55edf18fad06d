"""What an operator says of how models write, where their cards say otherwise or nothing."""

import msgspec

from diptych_contracts.cards import ModelCard
from diptych_text.formats import check_names


class ParserSettings(msgspec.Struct, frozen=True):
    """Parsers by model."""

    tools: dict[str, str] = {}
    reasoning: dict[str, str] = {}

    def applied(self, card: ModelCard) -> ModelCard:
        """`card`, with what was said of its model."""
        tools = self.tools.get(card.model, card.tool_parser)
        reasoning = self.reasoning.get(card.model, card.reasoning_parser)
        return msgspec.structs.replace(card, tool_parser=tools, reasoning_parser=reasoning)


def parser_settings(*, tools: str, reasoning: str) -> ParserSettings:
    """`model=parser, model=parser` twice. Raises `ValueError` for what is none."""
    made = ParserSettings(_pairs(tools, "tool_parsers"), _pairs(reasoning, "reasoning_parsers"))
    for name in made.tools.values():
        check_names(tools=name)
    for name in made.reasoning.values():
        check_names(reasoning=name)
    return made


def _pairs(text: str, name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        model, equals, parser = pair.rpartition("=")
        if not (model and equals and parser):
            raise ValueError(f"{name}: expected model=parser, saw {pair!r}")
        found[model.strip()] = parser.strip()
    return found
