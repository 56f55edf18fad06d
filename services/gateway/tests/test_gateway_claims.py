"""What is kept of an answer is all the journal says of it."""

import msgspec

from diptych_contracts.idempotency import Claim, ClaimState
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import TokenEntry
from diptych_gateway.idempotency.claims import _freed, _with, answer_of
from diptych_policy.journal import RequestView
from diptych_testkit.builders import GATEWAY, REQUEST, an_end, tokens


def test_tokens_of_every_attempt_are_one_entry() -> None:
    view = RequestView(RequestId(REQUEST))
    for part in (tokens(1, 2), tokens(3, index=2), an_end(tokens=3)):
        view.apply(part)
    answer = answer_of(view)
    assert answer.entry == tokens(1, 2, 3)
    again = RequestView(RequestId(REQUEST))
    again.apply(answer.entry)
    again.apply(answer.end)
    assert (again.token_ids, again.end) == (view.token_ids, view.end)


def test_a_claim_takes_the_end_of_its_own_request_alone() -> None:
    claim = Claim(
        digest="d",
        tenant="default",
        request_id=RequestId("another"),
        gateway=GATEWAY,
        journal_seq=0,
        created_unix_ms=0,
        deadline_unix_ms=0,
        give_up_unix_ms=0,
    )
    view = RequestView(RequestId(REQUEST))
    view.apply(an_end())
    answer = answer_of(view)
    for state in ClaimState:
        one = msgspec.structs.replace(claim, state=state)
        assert _with(one, view.request_id, answer) is None
        assert _freed(one, view.request_id) is None
    assert _with(claim, claim.request_id, answer) is not None
    assert _freed(claim, claim.request_id) is not None


def test_nothing_new_that_an_entry_says_is_left_out_unnoticed() -> None:
    """Whoever adds a field keeps it in `answer_of`, and names it here.

    A voice is not kept: who said it was checked when it was heard.
    """
    names = {field.name for field in msgspec.structs.fields(TokenEntry)}
    assert names == {"request_id", "attempt", "index", "token_ids", "logprobs", "voice"}
