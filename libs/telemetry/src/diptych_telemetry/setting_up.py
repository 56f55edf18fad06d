"""Telemetry of one process: on at its start, flushed at its end."""

from dataclasses import dataclass
from typing import Literal

from diptych_telemetry import logs, traces


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Who speaks, how loudly, and where spans go."""

    service: str
    incarnation: str
    log_level: str = "info"
    log_format: Literal["json", "text"] = "json"
    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector, e.g. `http://127.0.0.1:4318`; None exports nothing."""


def setup(settings: TelemetrySettings) -> None:
    """Configure logs and traces of this process; a later call replaces the earlier one."""
    logs.configure(
        level=settings.log_level,
        text=settings.log_format == "text",
        identity={"service": settings.service, "incarnation": settings.incarnation},
    )
    traces.start(
        service=settings.service,
        incarnation=settings.incarnation,
        otlp_endpoint=settings.otlp_endpoint,
    )


def shutdown() -> None:
    """Send the spans that still wait (a few seconds at most) and stop exporting."""
    traces.stop()
