"""Entries of a journal that were said with a wrong voice: dropped, counted, told once."""

from diptych_policy.journal import JournalPart, RequestView
from diptych_telemetry import logger, metrics

log = logger(__name__)


def forged(view: RequestView, part: JournalPart) -> None:
    """`view` has dropped `part`. A flood of them is one line for each request, and a number."""
    metrics.gateway().forged.inc()
    if view.forged == 1:
        said = str(type(part).__struct_config__.tag).partition(".")[0]
        log.warning("forged_entry", request_id=view.request_id, said=said, attempt=part.attempt)
