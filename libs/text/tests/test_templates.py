import pytest

from diptych_contracts.errors import InvalidRequest, Permanent
from diptych_text.templates import MAX_TEMPLATE_CHARS, ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def test_roles_names_and_the_generation_prompt_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ eos_token }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    messages = [{"role": "system", "content": " be brief "}, *USER]

    assert template.render(messages) == "<s>[system]be brief[user]hi[assistant]</s>"
    assert template.render(USER, add_generation_prompt=False) == "<s>[user]hi</s>"


def test_block_lines_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {%- if true %}\nx\n  {% endif %}\n{% endfor %}"
    )
    assert template.render(USER) == "x\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        (
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "13",
        ),
        ("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{% set x %}a{{ 'b' }}{% endset %}{{ x }}", "ab"),
        ("{% set x | upper %}ab{% endset %}{{ x }}", "AB"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 2 * 3 %}{{ ns.n }}", "6"),
        ("{{ 'a-b'.replace('-', '+').split('+') | join(',') }}", "a,b"),
        ("{{ 'a-b' | replace('-', '+') | upper }}", "A+B"),
        ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
        ("{{ 'x\ny' | indent('> ', first=true) }}", "> x\n> y"),
        ("{{ 2 ** 8 }} {{ 7 % 4 }}", "256 3"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{{ messages | map(attribute='role') | list | first }}", "user"),
        ("{% if tools is none and documents is none and not nothing %}none{% endif %}", "none"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content.x is defined }}", "False"),
    ],
)
def test_what_templates_use_works(source: str, text: str) -> None:
    assert ChatTemplate(source).render(USER) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alt"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_failing_template_is_a_clear_answer(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.param == "messages"
    assert caught.value.code == "template_error"


GROW = "{% set ns = namespace(s='a', l=[1], n=9) %}{% for i in range(60) %}%s{% endfor %}{{ ns.s }}"
HOSTILE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'a' }}",
    "{{ 9 ** (10 ** 9) }}",
    "{{ 9.0 ** 999 }}",
    GROW.replace("%s", "{% set ns.n = ns.n * ns.n %}"),
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ ['a' * 1000000] * 1000 }}",
    "{{ (['a' * 1000000] * 4000) | join }}",
    "{{ ''.join(['a' * 1000000] * 4000) }}",
    "{{ (['a' * 1000000] * 4000) | tojson }}",
    "{{ (['a' * 1000000] * 4000) | upper }}",
    "{{ [{'a' * 1000000: 1}] * 1000 }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
    "{% for i in range(9) %}{{ 'a' * 1000000 }}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10 ** 9) | list }}",
    GROW.replace("%s", "{% set ns.s = ns.s ~ ns.s %}"),
    GROW.replace("%s", "{% set ns.s = ns.s + ns.s %}"),
    GROW.replace("%s", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    GROW.replace("%s", "{% set ns.l = ns.l + ns.l %}"),
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_ends_with_an_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(USER)


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate("").render(USER)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "broken at line 1"),
        ("\n{{ x | center }}", "broken at line 2"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "has 262145 characters"),
    ],
)
def test_what_is_no_template_is_refused_when_loaded(source: str, message: str) -> None:
    with pytest.raises(Permanent, match=message):
        ChatTemplate(source)


def test_a_huge_conversation_is_refused_not_built() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="longer than 8000000 characters"):
        template.render([{"role": "user", "content": "x" * 1_000_000}] * 9)


def test_a_long_conversation_is_rendered() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}")
    assert len(template.render(USER * 5_000)) == 35_000
