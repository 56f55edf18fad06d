"""From what is asked and who answers to what the answer may be: its parts, and its grammar."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from diptych_contracts.answer_formats import AnswerFormat, Tool
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_gateway.admission.models import ServedModel
from diptych_gateway.judging.checking import Call
from diptych_gateway.judging.harmless import shown
from diptych_gateway.judging.tooling import Tooling
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


class Plan(NamedTuple):
    """What an answer may be."""

    format: AnswerFormat | None
    grammar: Grammar | None
    param: str
    """What asked for the grammar."""


def planned(call: Call, served: ServedModel, prompt_ids: Sequence[int]) -> Plan:
    """What the answer to `call` may be."""
    document, tooling = call.sampling.grammar, call.tooling
    if call.prompt is not None and not call.prompt.chat:
        return Plan(None, document, call.grammar_param)
    made = answer_format(tooling, served.codec, prompt_ids, structured=document is not None)
    card = served.card
    guarding = card.grammars and "tool_choice" not in card.unsupported
    found = grammar(made, tooling, served.codec, document=document, guarding=guarding)
    demanded = tooling is not None and bool(tooling.must)
    return Plan(made, found, "tool_choice" if demanded else "tools")


def answer_format(
    tooling: Tooling | None,
    codec: TextCodec,
    prompt_ids: Sequence[int],
    *,
    structured: bool = False,
) -> AnswerFormat | None:
    """The parts an answer to this prompt may have; None: text alone.

    Args:
        tooling: What may be called.
        codec: Of the model.
        prompt_ids: The prompt.
        structured: Whether the answer is a JSON document, where it does not call.
    """
    family = codec.family
    tools = ""
    if tooling is not None:
        tools = (family.tools or GENERIC) if codec.traits.tools else GENERIC
        if tooling.must or structured:
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


def grammar(
    made: AnswerFormat | None,
    tooling: Tooling | None,
    codec: TextCodec,
    *,
    document: Grammar | None = None,
    guarding: bool = True,
) -> Grammar | None:
    """What the answer must match: calls that must be made, or fit where strict, or a document.

    Args:
        made: The answer's parts.
        tooling: What may be called.
        codec: Of the model.
        document: What an answer that does not call must be.
        guarding: Whether the model's engine obeys grammars at all.
    """
    if made is None or (tooling is None and not (document and made.begun)):
        return document
    control_ids = codec.control_ids((*markers_of(made), *_thought_markers()))
    schema = "" if document is None else document.text
    if tooling is None:
        text: str | None = forcing_grammar(made, None, control_ids, document=schema)
    elif tooling.must or schema:
        must = tooling.must or tuple(tool.name for tool in tooling.tools)
        tools = [tool for tool in tooling.tools if tool.name in must]
        choice = Choice(tools, 1 if tooling.single else MAX_CALLS)
        schema = "" if tooling.must else schema
        text = forcing_grammar(made, choice, control_ids, document=schema)
    elif guarding and any(tool.strict for tool in tooling.tools):
        text = guarding_grammar(made, tooling.tools, control_ids)
    else:
        text = None
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
