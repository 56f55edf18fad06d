"""What a client of another server is told of parameters that are not known here."""

from typing import Any

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.completions.text_checks import check_completion, decode_completion
from diptych_gateway.judging.bodies import CommonBody, decode
from diptych_gateway.judging.checking import check
from diptych_gateway.judging.successors import SUCCESSORS
from diptych_gateway.responses.bodies import decode_response

CHAT = b'{"model": "m", "messages": [], "%s": 1}'
TEXT = b'{"model": "m", "prompt": "x", "%s": 2}'
RESPONSE = b'{"model": "m", "input": "x", "%s": 1}'


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("guided_json", "'response_format'"),
        ("structured_outputs", "'response_format'"),
        ("guided_regex", "'pattern'"),
        ("guided_choice", "'enum'"),
        ("use_beam_search", "'n'"),
        ("best_of", "'n'"),
        ("chat_template_kwargs", "'reasoning_effort'"),
        ("priority", "'service_tier'"),
        ("max_output_tokens", "'max_completion_tokens'"),
    ],
)
def test_an_unknown_parameter_of_another_server_names_its_successor(
    name: str, successor: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(CHAT % name.encode())
    assert refused.value.param == name
    assert refused.value.code == "unknown_parameter"
    assert successor in str(refused.value)


def test_a_parameter_of_another_endpoint_names_its_own() -> None:
    with pytest.raises(InvalidRequest, match="'max_output_tokens'"):
        decode_response(RESPONSE % b"max_tokens")
    with pytest.raises(InvalidRequest, match=r"'text\.format'"):
        decode_response(RESPONSE % b"response_format")


def test_best_of_of_completions_names_n() -> None:
    with pytest.raises(InvalidRequest, match="'n' has taken its place"):
        check_completion(decode_completion(TEXT % b"best_of"))


def test_nobody_is_sent_to_a_parameter_that_every_endpoint_has() -> None:
    assert not SUCCESSORS.keys() & set(CommonBody.__struct_fields__)


@pytest.mark.parametrize(
    ("value", "said"),
    [({"max_tokens": 0}, "from 1, up to 2147483647"), ({"temperature": 3}, "from 0, up to 2")],
)
def test_limits_are_told_in_full(value: dict[str, Any], said: str) -> None:
    body = decode(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')
    for name, given in value.items():
        setattr(body, name, given)
    with pytest.raises(InvalidRequest, match=said):
        check(body)
