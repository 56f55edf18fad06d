import pytest

from diptych_contracts.answer_formats import AnswerFormat
from diptych_text.formats import Family, check_names, family_of, markers_of

BAR = "\uff5c"
SNIPPETS = [
    ("{{ '<tool_call>' + (call | tojson) + '</tool_call>' }}", Family("hermes")),
    ("{{ '<tool_call>' }}{{ text.split('</think>') }}", Family("hermes", "think")),
    ("<tool_call>{{ '<function=' ~ name ~ '>' }}{{ '<parameter=' ~ k }}", Family("qwen3_coder")),
    ("[TOOL_CALLS]{{ calls | tojson }}", Family("mistral")),
    ("[TOOL_CALLS]{{ calls }}[THINK]{{ thought }}[/THINK]", Family("mistral", "bracket")),
    (f"<{BAR}tool▁call▁begin{BAR}>{{{{ name }}}}", Family("deepseek")),
    ("<|tool_call|>{{ calls | tojson }}", Family("granite")),
    ("<|tool_call|>{{ calls }}<|/tool_call|>", Family("phi")),
    ("{{ '<|python_tag|>' }}", Family("llama3")),
    ('<|start_header_id|>{"name": f, "parameters": {}}', Family("llama3")),
    ("<|python_start|>{{ code }}<|python_end|>", Family("pythonic")),
    ("<start_function_call>call:{{ name }}", Family("functiongemma")),
    ("<|channel|>final<|message|>{{ text }}", Family("harmony", "harmony")),
    ("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", Family()),
]


@pytest.mark.parametrize(("template", "family"), SNIPPETS)
def test_a_template_says_by_its_markers_what_its_model_speaks(
    template: str, family: Family
) -> None:
    assert family_of(template) == family


def test_a_parser_is_given_the_markers_it_reads_and_no_others() -> None:
    made = AnswerFormat(tools="hermes", reasoning="think")
    assert markers_of(made) == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert markers_of(AnswerFormat()) == ()


def test_an_unknown_name_is_refused() -> None:
    check_names(tools="none", reasoning="think")
    with pytest.raises(ValueError, match=r"tool format: expected one of hermes, .* saw 'klingon'"):
        check_names(tools="klingon")
    with pytest.raises(ValueError, match=r"reasoning format: .* saw 'deep'"):
        check_names(reasoning="deep")
