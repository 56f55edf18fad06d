"""Settings of the prefill worker."""

from dataclasses import dataclass

from diptych_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class PrefillWorkerSettings(WorkerSettings):
    """`DIPTYCH_PREFILL_WORKER__<NAME>`."""
