"""Template code in what clients write is text: in content, roles, names, tools and arguments."""

from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_text.templates import ChatTemplate

SOURCE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{{ tool.function.name }}: {{ tool.function.description }}
{%- endfor %}
{%- for m in messages %}
{{ m.role }}/{{ m.name }}: {{ m.content | trim }}
{%- for call in m.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments }})
{%- endfor %}
{%- endfor %}
"""
INJECTED = [
    "{{ 7 * 7 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(lipsum) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set messages = [] %}{{ messages }}",
    "{% include '/etc/passwd' %}{% import 'os' as os %}",
    "{# a comment #}{{ raise_exception('x') }}",
    "{%- raw %}{{ x }}{% endraw -%}",
    "%(secret)s ${secret} {secret} {0.__class__}",
    "# for x in y\n## line statement",
]


def a_conversation(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    call = {"function": {"name": text, "arguments": text}}
    messages = [
        {"role": text, "content": text, "name": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
    ]
    function = {"name": text, "description": text, "parameters": {text: text}}
    return messages, [{"type": text, "function": function}]


@pytest.mark.parametrize("text", INJECTED)
def test_template_code_in_what_clients_write_is_never_run(text: str) -> None:
    messages, tools = a_conversation(text)
    told = ChatTemplate(SOURCE).render(messages, tools=tools)
    # Name and description; role, name and content; content; the call's name and arguments.
    assert told.count(text) >= 8
    assert "49" not in told.replace(text, "")
    assert "root:" not in told


REACHING = [
    "{{ messages.__class__ }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ (''|attr('__cla' ~ 'ss__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'.__mod__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__.os }}",
    "{{ self.__init__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__.co_consts }}",
    "{{ strftime_now.__globals__ }}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import system %}",
    "{% include '/etc/passwd' %}",
    "{% extends '../../etc/passwd' %}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ {}.__class__.fromkeys }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ messages | map('attr', '__class__') | map(attribute='__mro__') | list | string | length }}",
    "{{ messages | sum(attribute='__class__') }}",
    "{{ messages | groupby('__class__') | first }}",
]


@pytest.mark.parametrize("source", REACHING)
def test_a_hostile_template_of_a_card_reaches_nothing_of_the_process(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    try:
        told = ChatTemplate(source).render(messages)
    except InvalidRequest as err:
        told = str(err)
    # An unsafe attribute is undefined: it says nothing, or ends with an error.
    for revealing in ("<class", "<module", "<function", "<built-in", "root:", "object at 0x"):
        assert revealing not in told, told
