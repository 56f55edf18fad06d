"""How an answer's text is taken apart, decided once when it is asked for.

It travels with the request, so that any gateway makes the same parts of the same text later.
"""

from diptych_contracts.wire import Message


class AnswerFormat(Message, frozen=True, kw_only=True, tag="answer_format.1"):
    """Which parts an answer may have besides text, and how they are written.

    The names are those of `diptych_text.formats`; empty: no such parts.
    """

    tools: str = ""
    reasoning: str = ""
    begun: bool = False
    """Whether the prompt ended inside of reasoning."""
    single: bool = False
    """Only the first call counts."""
    texts: tuple[str, ...] = ()
    """`tool.parameter` of those of type string, where the format does not tell."""


class ToolCall(Message, frozen=True, kw_only=True, tag="tool_call.1"):
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class Tool(Message, frozen=True, kw_only=True, tag="tool.1"):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: str | None = None
    """A JSON schema."""
    strict: bool | None = None
