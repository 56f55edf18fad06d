"""Settings of the decode worker."""

from dataclasses import dataclass

from diptych_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class DecodeWorkerSettings(WorkerSettings):
    """`DIPTYCH_DECODE_WORKER__<NAME>`."""
