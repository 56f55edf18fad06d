"""Queries: lists as clients write them, and what was said twice."""

import pytest

from diptych_contracts.errors import InvalidRequest
from diptych_gateway.files.paging import paging
from diptych_gateway.responses.input_pages import page
from diptych_gateway.responses.serving import query


def scope(text: str) -> dict[str, object]:
    return {"query_string": text.encode(), "headers": []}


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    "text",
    [
        f"include[]={LOGPROBS}",
        f"include={LOGPROBS}",
        f"include[]={LOGPROBS}&include[]=reasoning.encrypted_content",
    ],
)
def test_the_stock_clients_may_say_what_to_include(text: str) -> None:
    assert not query(scope(text)).stream
    assert page(scope(text)).limit == 20


@pytest.mark.parametrize("read", [query, page])
def test_what_cannot_be_included_is_named(read: object) -> None:
    assert callable(read)
    with pytest.raises(InvalidRequest) as refused:
        read(scope("include[]=file_search_call.results"))
    assert refused.value.param == "include"


def test_a_parameter_that_was_given_twice_is_named() -> None:
    with pytest.raises(InvalidRequest, match="twice") as refused:
        query(scope("stream=true&starting_after=1&starting_after=2"))
    assert refused.value.param == "starting_after"
    with pytest.raises(InvalidRequest, match="twice"):
        page(scope("limit=5&limit=6"))
    with pytest.raises(InvalidRequest, match="twice"):
        paging(scope("limit=5&limit=6"), most=10, usual=1)
