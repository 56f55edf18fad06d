import json
from typing import Any

import msgspec
import pytest

from diptych_contracts.answer_formats import Tool
from diptych_contracts.errors import InvalidRequest
from diptych_testkit.tiny_gguf import BOS_ID, CONTROL_TOKENS, EOS_ID, tiny_card
from diptych_text.codec import TextCodec
from diptych_text.template_traits import TemplateTraits, traits_of
from diptych_text.templates import ChatTemplate

TOOL = Tool(
    name="weather",
    description="How it is",
    parameters='{"type": "object", "properties": {"city": {"type": "string"}}}',
)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LISTS = "{% for t in tools or [] %}{{ t.function.name }}: {{ t | tojson }}{% endfor %}"
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}ARGUMENTS{% endfor %}{% endfor %}"
)
MAPPING = LISTS + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TEXT = LISTS + CALLS.replace("ARGUMENTS", "{{ '(' + c.function.arguments + ')' }}")
STRICT = MAPPING.replace("{{ m.content or '' }}", "{{ m.content + '' }}")


def codec_of(template: str) -> TextCodec:
    return TextCodec.from_card(msgspec.structs.replace(tiny_card(), chat_template=template))


def decoded(codec: TextCodec, ids: list[int]) -> str:
    return b"".join(map(codec.token_bytes, ids)).decode()


@pytest.mark.parametrize(
    ("template", "traits"),
    [
        (PLAIN, TemplateTraits()),
        (MAPPING, TemplateTraits(tools=True, calls=True)),
        (TEXT, TemplateTraits(tools=True, calls=True, text_arguments=True)),
        (STRICT, TemplateTraits(tools=True, calls=True, null_content=False)),
        (LISTS + PLAIN, TemplateTraits(tools=True)),
    ],
)
def test_a_template_shows_what_it_can_say(template: str, traits: TemplateTraits) -> None:
    assert traits_of(ChatTemplate(template)) == traits


@pytest.mark.parametrize(
    ("template", "said"),
    [(MAPPING, 'weather{"city": "Paris"}'), (TEXT, 'weather({"city": "Paris"})')],
)
def test_calls_and_results_are_said_as_the_template_wants_them(template: str, said: str) -> None:
    codec = codec_of(template)
    text = decoded(codec, codec.encode_chat(LOOP, tools=[TOOL]))
    assert text.startswith('weather: {"type": "function", "function": {"name": "weather"')
    assert text.endswith(f"[user]Weather?[assistant]{said}[tool]sunny")


def test_a_model_without_tools_is_told_of_them_in_words() -> None:
    codec = codec_of(PLAIN)
    text = decoded(codec, codec.encode_chat(LOOP, tools=[TOOL]))
    assert text.startswith("[system]You can call functions.")
    listed = next(line for line in text.splitlines() if line.startswith("{"))
    assert json.loads(listed)["name"] == "weather"
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert text.endswith("[user]<tool_response>\nsunny\n</tool_response>")


def test_the_words_follow_a_system_message_that_is_there() -> None:
    codec = codec_of(PLAIN)
    messages = [{"role": "system", "content": "Be kind."}, LOOP[0]]
    text = decoded(codec, codec.encode_chat(messages, tools=[TOOL]))
    assert text.startswith("[system]Be kind.\n\nYou can call functions.")


@pytest.mark.parametrize("template", [MAPPING, PLAIN])
@pytest.mark.parametrize("forged", CONTROL_TOKENS)
def test_control_tokens_in_tools_calls_and_results_are_text(template: str, forged: str) -> None:
    codec = codec_of("{{ bos_token }}" + template + "{{ eos_token }}")
    schema = {"type": "object", "properties": {forged: {"enum": [forged], "type": "string"}}}
    tool = Tool(name="weather", description=forged, parameters=json.dumps(schema))
    function = {"name": "weather", "arguments": json.dumps({forged: [forged]})}
    messages = [
        LOOP[0],
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "content": forged, "tool_call_id": "call_1"},
    ]

    ids = codec.encode_chat(messages, tools=[tool])

    assert [i for i in ids if codec.is_control(i)] == [BOS_ID, EOS_ID]
    assert decoded(codec, ids).count(forged) == 6


def test_broken_arguments_of_a_call_are_said_as_they_are() -> None:
    codec = codec_of(MAPPING)
    function = {"name": "weather", "arguments": '{"city": '}
    messages = [LOOP[0], {**LOOP[1], "tool_calls": [{**CALL, "function": function}]}]
    text = decoded(codec, codec.encode_chat(messages))
    assert text.endswith('weather{"arguments": "{\\"city\\": "}')


@pytest.mark.parametrize("levels", [60, 200, 5_000])
@pytest.mark.parametrize("template", [MAPPING, PLAIN])
def test_arguments_that_nest_without_end_are_text(template: str, levels: int) -> None:
    codec = codec_of(template)
    function = {"name": "weather", "arguments": '{"a":' * levels + "1" + "}" * levels}
    messages = [LOOP[0], {**LOOP[1], "tool_calls": [{**CALL, "function": function}]}]
    text = decoded(codec, codec.encode_chat(messages))
    assert ('\\"a\\"' in text) == (levels > 64)


def test_nothing_is_rendered_before_the_first_part_is_asked_for() -> None:
    codec = codec_of("{{ raise_exception('now') }}")
    parts = codec.chat_parts(LOOP[:1])
    with pytest.raises(InvalidRequest, match="now"):
        next(parts)


def test_whether_a_prompt_ends_inside_of_reasoning() -> None:
    codec = codec_of(PLAIN)
    assert codec.ends_with(codec.encode("Hi <think>\n"), "<think>")
    assert not codec.ends_with(codec.encode("<think>\n\n</think>\n\n"), "<think>")
    assert codec.ends_with(codec.encode("Hi <|im_end|>"), "<|im_end|>")
