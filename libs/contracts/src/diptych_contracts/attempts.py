"""A worker's question whether it works in vain: `current.<worker>`, request and typed answer."""

from diptych_contracts.ids import RequestId
from diptych_contracts.wire import Message


class AttemptAsk(Message, frozen=True, kw_only=True, tag="attempt_ask.1"):
    """From a worker to any scheduler: is this attempt of mine still wanted?"""

    request_id: RequestId
    attempt: int


class AttemptIs(Message, frozen=True, kw_only=True, tag="attempt_is.1"):
    """The answer. Where nothing is known of the request, it is not overtaken."""

    overtaken: bool
