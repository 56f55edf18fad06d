"""Logs, traces and metrics: set up once per process, used everywhere."""

from diptych_telemetry.logs import context, logger
from diptych_telemetry.setting_up import TelemetrySettings, setup, shutdown
from diptych_telemetry.traces import recorded_spans, tracer

__all__ = [
    "TelemetrySettings",
    "context",
    "logger",
    "recorded_spans",
    "setup",
    "shutdown",
    "tracer",
]
