"""Answers workers that ask whether they work in vain: they may not read records themselves."""

from diptych_bus.port import Bus, Delivery, Subscription
from diptych_contracts import subjects
from diptych_contracts.attempts import AttemptAsk, AttemptIs
from diptych_contracts.errors import Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_policy.overtaken import overtaken
from diptych_telemetry import logger

log = logger(__name__)


class AttemptDesk:
    """Every replica answers from the record itself, whoever owns it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records = bus.bucket(REQUEST_RECORDS, RequestRecord)

    async def start(self) -> Subscription:
        """Answer from now on."""
        return await self._bus.serve(subjects.CURRENT, self._on_ask)

    async def _on_ask(self, delivery: Delivery) -> AttemptIs:
        ask: AttemptAsk = delivery.decode(AttemptAsk)
        worker = Incarnation(delivery.subject.rpartition(".")[2])
        try:
            kept = await self._records.get(ask.request_id)
        except Permanent as err:  # nobody can read it: its fence and its deadline are left
            log.error("record_unreadable", request_id=ask.request_id, error=str(err))
            return AttemptIs(overtaken=False)
        vain = kept is not None and overtaken(kept.value, ask.attempt, worker)
        return AttemptIs(overtaken=vain)
