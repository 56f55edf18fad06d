"""From what is asked and who answers to what the answer may be: its parts, and its grammar."""

from collections.abc import Sequence
from typing import Any

import msgspec

from diptych_contracts.answer_formats import AnswerFormat, Tool
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_gateway.harmless import shown
from diptych_gateway.tooling import Tooling
from diptych_text.codec import TextCodec
from diptych_text.forcing import MAX_CALLS, Choice, forced_format, forcing_grammar, guarding_grammar
from diptych_text.formats import GENERIC, THOUGHT_FORMATS, markers_of

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def template_variables(effort: str | None, codec: TextCodec, *, param: str) -> dict[str, Any]:
    """What the template is told of the effort asked for.

    Raises:
        InvalidRequest: it is none, or the model cannot be told.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(
            f"'{param}': expected one of {', '.join(EFFORTS)}, saw {shown(effort)}", param=param
        )
    if codec.knows("reasoning_effort"):
        return {"reasoning_effort": effort}
    if codec.knows("enable_thinking"):
        return {"enable_thinking": effort != "none"}
    if effort == "none" and not codec.family.reasoning:
        return {}
    raise InvalidRequest(
        f"'{param}' is not supported by this model: its chat template takes no such setting",
        param=param,
        code="unsupported_parameter",
    )


def answer_format(
    tooling: Tooling | None, codec: TextCodec, prompt_ids: Sequence[int]
) -> AnswerFormat | None:
    """The parts an answer to this prompt may have; None: text alone."""
    family = codec.family
    tools = ""
    if tooling is not None:
        tools = (family.tools or GENERIC) if codec.traits.tools else GENERIC
        if tooling.must:
            tools = forced_format(tools)
    if not tools and not family.reasoning:
        return None
    thought = THOUGHT_FORMATS.get(family.reasoning)
    return AnswerFormat(
        tools=tools,
        reasoning=family.reasoning,
        begun=thought is not None and codec.ends_with(prompt_ids, thought.opening),
        single=tooling is not None and tooling.single,
        texts=_texts(tooling.tools) if tooling is not None and tools == "qwen3_coder" else (),
    )


def grammar(made: AnswerFormat | None, tooling: Tooling | None, codec: TextCodec) -> Grammar | None:
    """What the answer must match so that calls are made that must be, and fit where strict."""
    if made is None or tooling is None:
        return None
    control_ids = codec.control_ids((*markers_of(made), *_thought_markers()))
    if tooling.must:
        tools = [tool for tool in tooling.tools if tool.name in tooling.must]
        choice = Choice(tools, 1 if tooling.single else MAX_CALLS)
        return Grammar(kind="lark", text=forcing_grammar(made, choice, control_ids))
    if not any(tool.strict for tool in tooling.tools):
        return None
    text = guarding_grammar(made, tooling.tools, control_ids)
    return None if text is None else Grammar(kind="lark", text=text)


def _thought_markers() -> list[str]:
    return [m for t in THOUGHT_FORMATS.values() if t is not None for m in (t.opening, t.closing)]


def _texts(tools: Sequence[Tool]) -> tuple[str, ...]:
    found: list[str] = []
    for tool in tools:
        schema = msgspec.json.decode(tool.parameters or "{}")
        properties = schema.get("properties")
        for name, inner in (properties if isinstance(properties, dict) else {}).items():
            if isinstance(inner, dict) and inner.get("type") == "string":
                found.append(f"{tool.name}.{name}")
    return tuple(found)
