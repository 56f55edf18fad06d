"""What workers ask: which of the attempts they run count no more."""

from collections.abc import Callable

from diptych_bus.port import Bus, Delivery
from diptych_contracts import subjects
from diptych_contracts.errors import Permanent
from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import MAX_ATTEMPTS_ASKED, AttemptsAsk, AttemptsTold
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_policy.overtaken import overtaken
from diptych_telemetry import logger

log = logger("scheduler")


class Standing:
    """Answers for all records, whoever owns them.

    Every replica does, and the first answer counts: each knows the live ones by its watch, so only
    what is over is looked up.

    Args:
        bus: Where they are.
        known: A record that is live, as far as this scheduler knows.
    """

    def __init__(self, bus: Bus, known: Callable[[RequestId], RequestRecord | None]) -> None:
        self._bus = bus
        self._known = known
        self._bucket = bus.bucket(REQUEST_RECORDS, RequestRecord)

    async def listen(self) -> None:
        """Answer from now on."""
        await self._bus.serve(subjects.ATTEMPTS, self._answer)

    async def _answer(self, delivery: Delivery) -> AttemptsTold:
        """Those that run in vain; raises `Transient` if the bus is away, `Permanent` for nonsense.

        A worker is told of its own attempts only: the subject says who asks.
        """
        ask: AttemptsAsk = delivery.decode(AttemptsAsk)
        asker_is_told = delivery.subject == subjects.attempts(ask.worker)
        if not asker_is_told or len(ask.attempts) > MAX_ATTEMPTS_ASKED:
            raise Permanent(f"expected a worker's question on its own subject, saw {ask.worker!r}")
        vain = []
        for request_id, attempt in ask.attempts:
            record = self._known(request_id) or await self._looked_up(request_id)
            if record is not None and overtaken(record, attempt, ask.worker):
                vain.append((request_id, attempt))
        return AttemptsTold(vain=tuple(vain))

    async def _looked_up(self, request_id: RequestId) -> RequestRecord | None:
        try:
            kept = await self._bucket.get(request_id)
        except Permanent as err:  # nobody can read it: its fence and its deadline are left
            log.error("record_unreadable", request_id=request_id, error=str(err))
            return None
        return None if kept is None else kept.value
