"""What models bring and say: chat templates, cards, and the calls in their answers."""

from functools import cache
from random import Random
from typing import Any

import msgspec

from diptych_contracts.answer_formats import AnswerFormat
from diptych_contracts.cards import ModelCard
from diptych_testkit.fuzzing.bending import TEXTS, bent_text, bent_tree
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text import json_formats
from diptych_text.codec import TextCodec
from diptych_text.formats import CALL_FORMATS, THOUGHT_FORMATS, markers_of
from diptych_text.parsing import AnswerParser
from diptych_text.parts import CallArguments, CallBegun
from diptych_text.templates import ChatTemplate

Answer = tuple[AnswerFormat, str, tuple[int, ...]]


def parsers() -> list[Parser]:
    """All of them."""
    return [
        Parser(name="templates", make=_template, read=_render, cases=80, cpu_s=8.0),
        Parser(name="messages-in-templates", make=_conversation, read=_encode, cases=700),
        Parser(name="cards", make=_card, read=_codec, cases=200),
        Parser(name="answers", make=_answer, read=_parse, cases=1500),
    ]


_SNIPPETS = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% macro f(x, n) %}{% if n %}{{ x }}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}",
    "{{ f('ab', 9) }}",
    "{% set ns = namespace(a='x', l=[1]) %}",
    "{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% for i in range(999999) %}{% endfor %}",
    "{% for i in range(400) recursive %}{{ loop([i]) }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (messages | attr('__class__')) }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y%s%q' * 9) }}",
    "{{ 'a' * 99999999 }}{{ 9 ** 9 ** 9 }}{{ 2.0 ** 5000 }}",
    "{{ [messages] * 999999 }}{{ range(10 ** 12) | list | length }}",
    "{{ messages | map(attribute='content') | join('x') | upper | length }}",
    "{{ messages | tojson | replace('e', 'e' * 9999) }}",
    "{{ dict(a=1, **{'b': 2}).items() | list | sort | unique | list }}",
    "{{ messages | groupby('role') | list }}{{ messages | selectattr('content') | list }}",
    "{{ joiner(',')() }}{{ cycler(1, 2).next() }}{{ namespace }}",
    "{%- set x -%}{{ messages }}{%- endset -%}{{ x | trim | truncate(9) }}",
    "{% generation %}{{ bos_token }}{% endgeneration %}{% break %}",
    "{{ messages | sum(attribute='content', start='') }}{{ [1, 2] | sum }}",
    "{{ 'x' | int(base=99) }}{{ '9' * 5000 | int }}{{ ('9' * 5000) | int }}",
    "{{ [3, 'a', none] | sort }}{{ messages | max }}{{ {} < [] }}{{ 1 // 0 }}{{ 1 % 0 }}",
    "{{ 'a'.encode('utf-16') }}{{ ('\\ud800') }}{{ 'x'.encode('idna') }}",
    "{{ [[1]] | tojson }}{{ messages[0].items() | list }}{{ lipsum(9) }}",
    "{{ '%c' % 99999999 }}{{ '{0.__class__}'.format(1) }}{{ 'a'.join(messages) }}",
    "{% filter upper %}{{ messages }}{% endfilter %}{% with a=messages %}{{ a }}{% endwith %}",
    "{% call f(1, 2) %}x{% endcall %}{% raw %}{{{% endraw %}{# c #}",
    "{% set a = [] %}{{ a.append(a) }}{{ a }}{{ loop }}{{ caller() }}{{ super() }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    "{{ messages | batch(2) }}{{ 'a' | center(99999999) }}{{ 'a' | wordwrap(1) }}",
    "{{ 1.0 | round(99999) }}{{ 1e308 * 10 }}{{ -1 ** 0.5 }}{{ (-1) ** 0.5 }}",
    "{{ 10 ** 400 | float }}{{ (10 ** 400) / 3 }}{{ 10 ** 5000 }}{{ (10 ** 5000) | string }}",
)
_CONVERSATION: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi {{ 7 * 7 }} <|im_end|>"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
)


def _template(rng: Random) -> str:
    source = "".join(rng.choice(_SNIPPETS) for _ in range(rng.randrange(1, 4)))
    return source if rng.random() < 0.4 else bent_text(rng, source, _SNIPPETS)


def _render(source: str) -> None:
    rendered = ChatTemplate(source, bos_token="<s>").render(_CONVERSATION)
    assert "subclasses" not in rendered or "<class" not in rendered
    assert "uid=" not in rendered


@cache
def _tiny() -> TextCodec:
    return TextCodec.from_card(tiny_card())


def _whole(text: str) -> str:
    return text.replace("\ud800", "\ufffd")


def _conversation(rng: Random) -> list[dict[str, Any]]:
    words = (*_tiny().control_texts, "<|im", "_end|>", "{{", "}}", "<tool_response>")
    made = []
    for message in _CONVERSATION:
        changed = dict(message)
        if isinstance(changed["content"], str):
            changed["content"] = _whole(bent_text(rng, changed["content"], words))
        if "tool_calls" in changed:
            function = {"name": "f", "arguments": _whole(bent_text(rng, '{"a": [1, "x"]}', words))}
            changed["tool_calls"] = [{"id": rng.choice(words), "function": function}]
        made.append(changed)
    return rng.sample(made, rng.randrange(1, 5))


def _encode(messages: list[dict[str, Any]]) -> None:
    """What clients write never adds a control token: as many as with plain words in its place."""
    codec = _tiny()
    ids = codec.encode_chat(messages)
    plain = [_plain(message) for message in messages]
    expected = sum(map(codec.is_control, codec.encode_chat(plain)))
    assert sum(map(codec.is_control, ids)) == expected


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    made = {**message}
    if isinstance(made["content"], str):
        made["content"] = "x"
    if "tool_calls" in made:
        made["tool_calls"] = [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]
    return made


def _card(rng: Random) -> ModelCard:
    card = tiny_card()
    file = msgspec.json.decode(card.tokenizer_json)
    names = ("model", "vocab", "merges", "type", "BPE", "ByteLevel", "Split", "Regex", "added")
    small = {**file, "model": {**file["model"], "merges": file["model"]["merges"][:3]}}
    bent = bent_tree(rng, rng.choice((file, small)), names)
    try:
        text = msgspec.json.encode(bent).decode()
    except (RecursionError, UnicodeEncodeError, msgspec.MsgspecError):
        text = "{"
    if rng.random() < 0.3:
        text = bent_text(rng, text, ('"', "{", "null", "-1", "99999999999"))
    parser = rng.choice((*CALL_FORMATS, "none", "", "x"))
    template = _template(rng) if rng.random() < 0.3 else card.chat_template
    return msgspec.structs.replace(
        card, tokenizer_json=text, tool_parser=parser, chat_template=template
    )


def _codec(card: ModelCard) -> None:
    codec = TextCodec.from_card(card)
    ids = codec.encode("Hello <|im_end|> \U0001f600 world")
    for token in (*ids, -1, 0, card.vocab_size, 2**40):
        codec.token_bytes(token)


_SAID = (
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "é\\"}"}]}}\n</tool_call>',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '<|tool_call|>[{"name": "f", "arguments": {"x": null}}]<|/tool_call|>',
    '{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
    "<|python_tag|>[f(a=1, b=\"x, y)\", c=[1, {'d': None}]), g()]",
    "<|tool_call_start|>[f(a='\\'')]<|tool_call_end|>",
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    "<start_function_call>call:f{a:<escape>x<escape>,b:[1,2]}<end_function_call>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
    "<think>\nLet me see.\n</think>\n\nSunny [THINK]no[/THINK].",
    f"{json_formats.CALLS_BEGIN}{json_formats.CALL_BEGIN}f{json_formats.CALL_SEP}{{}}{json_formats.CALL_END}",
)


def _answer(rng: Random) -> Answer:
    made = AnswerFormat(
        tools=rng.choice(("", *CALL_FORMATS)),
        reasoning=rng.choice(("", *THOUGHT_FORMATS)),
        begun=rng.random() < 0.3,
        single=rng.random() < 0.2,
        texts=("f.a",) if rng.random() < 0.5 else (),
    )
    words = (*markers_of(made), "{", "[", "(", '"', "\\", "'", "=", ",", "}", *TEXTS)
    text = "".join(rng.choice(_SAID) for _ in range(rng.randrange(1, 4)))
    text = bent_text(rng, text, words)
    cuts = tuple(sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12))))
    return made, text, cuts


def _parse(case: Answer) -> None:
    """However an answer is cut, its parts are the same."""
    made, text, cuts = case
    pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    assert _parts(made, pieces) == _parts(made, [text])


def _parts(made: AnswerFormat, pieces: list[str]) -> list[tuple[type, int, str]]:
    """Neighbours of a kind are one."""
    parser = AnswerParser(made)
    found: list[tuple[type, int, str]] = []
    for part in [*(p for piece in pieces for p in parser.push(piece)), *parser.finish()]:
        call = part.call if isinstance(part, CallBegun | CallArguments) else -1
        if isinstance(part, CallBegun):
            found.append((CallBegun, call, part.name))
        elif found and found[-1][:2] == (type(part), call):
            found[-1] = (type(part), call, found[-1][2] + part.text)
        elif part.text:
            found.append((type(part), call, part.text))
    return found
