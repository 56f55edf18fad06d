"""A process's life around its service: telemetry, bus, beats, probes, signals, a clean end.

Exit codes: 0 stopped as asked; 2 it can never start like this (settings, a wrong model file);
1 anything else, to be started again. An error that escapes the service is logged once and ends the
process: recovery takes over. Losing the bus is no such error.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_bus.port import Bus
from diptych_chassis import admission, health
from diptych_chassis.beats import BeatThread
from diptych_chassis.cancelling import cancellable
from diptych_chassis.core_dumps import leave_none
from diptych_chassis.ending import Ending
from diptych_chassis.member import Member
from diptych_chassis.repeating import every
from diptych_chassis.settings import EXIT_BAD_SETTINGS, ServiceSettings
from diptych_chassis.vitals import Vitals
from diptych_contracts.errors import DiptychError, Permanent, Transient
from diptych_contracts.ids import Incarnation, new_incarnation
from diptych_telemetry import TelemetrySettings, logger, metrics, setup, shutdown

Serve = Callable[[Member], Awaitable[None]]
"""A service: says `member.ready(True)`, works until `member.stopping` is set, then returns."""

__all__ = ["Member", "Serve", "run"]

EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_PROBE_PERIOD_S = 0.25

log = logger(__name__)


def run(
    service: str,
    settings: ServiceSettings,
    serve: Serve,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Live one life of `service`; gives the exit code."""
    rng = Random(secrets.randbits(128))
    if not settings.core_dumps:
        leave_none()
    try:
        me = admission.access(service, settings)
    except Permanent as err:
        setup(_telemetry(service, new_incarnation(service, rng), settings))
        return _report(err, ever_ready=False)
    setup(_telemetry(service, me.name, settings))
    code = EXIT_FAILED
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(_live(service, me, settings, serve=serve, rng=rng))
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    except asyncio.CancelledError:
        pass  # the end was insisted on (`ending`) while a thread went on
    finally:
        shutdown()
    return code


def _telemetry(
    service: str, incarnation: Incarnation, settings: ServiceSettings
) -> TelemetrySettings:
    return TelemetrySettings(
        service=service,
        incarnation=incarnation,
        log_level=settings.log_level,
        log_format=settings.log_format,
        otlp_endpoint=settings.otlp_endpoint,
    )


async def _live(
    service: str,
    me: Access,
    settings: ServiceSettings,
    *,
    serve: Serve,
    rng: Random,
) -> int:
    ending = Ending(settings.drain_s)
    vitals = Vitals(time.monotonic())
    try:
        async with ending.limited():
            log.info("service_connecting")
            async with _joined(settings, me) as bus:
                member = Member(
                    service=service,
                    incarnation=me.name,
                    bus=bus,
                    access=me,
                    rng=rng,
                    stopping=ending.stopping,
                    vitals=vitals,
                )
                async with _vital_signs(member, settings, me):
                    ending.serving = True
                    await _serve(member, serve)
    except Exception as err:
        return _report(_sole(err), ever_ready=vitals.ever_ready)
    log.info("service_stopped")
    return EXIT_FAILED if ending.cut_off else 0


@contextlib.asynccontextmanager
async def _joined(settings: ServiceSettings, me: Access) -> AsyncIterator[JetStreamBus]:
    connecting = JetStreamBus.connect(
        settings.nats_url,
        name=me.name,
        wait_s=settings.bus_wait_s,
        replicas=settings.stream_replicas,
        access=me,
    )
    bus = await cancellable(connecting)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def _vital_signs(
    member: Member, settings: ServiceSettings, me: Access
) -> AsyncIterator[None]:
    """Beats and probes, from a thread of their own."""
    metrics.process()  # before two threads want it made at once
    beats = BeatThread(
        member.incarnation,
        member.service,
        url=settings.nats_url,
        vitals=member.vitals,
        access=me.another(),
    )
    pages = health.HealthServer(settings.health_host, settings.health_port, _pages(member))
    beats.start()
    leaving = False
    try:
        await _listen(beats, pages, settings)
        log.info("service_started", health_port=pages.port)
        yield
        leaving = True
    finally:
        if member.vitals.readiness.ready:  # else it has said why not: "drained", say
            member.ready(False, "stopped")
        await asyncio.to_thread(beats.stop, leaving=leaving)


async def _listen(beats: BeatThread, pages: health.HealthServer, settings: ServiceSettings) -> None:
    try:
        await asyncio.to_thread(beats.call, pages.start())
    except OSError as err:
        where = f"{settings.health_host}:{settings.health_port}"
        raise Transient(f"cannot listen on {where} for health probes: {err.strerror}") from err


def _pages(member: Member) -> dict[str, health.Page]:
    vitals = member.vitals

    def live() -> health.Answer:
        now_s = time.monotonic()
        return health.verdict(vitals.live(now_s), silent_s=round(vitals.silent_s(now_s), 3))

    def ready() -> health.Answer:
        readiness = vitals.readiness
        serves = readiness.ready and vitals.live(time.monotonic())
        return health.verdict(serves, detail=readiness.detail, incarnation=member.incarnation)

    def measured() -> health.Answer:
        metrics.process().ready.set(vitals.readiness.ready)
        metrics.process().bus_connected.set(member.bus.connected)
        return health.Answer(200, metrics.render(), metrics.CONTENT_TYPE)

    return {"/health/live": live, "/health/ready": ready, "/metrics": measured}


async def _serve(member: Member, serve: Serve) -> None:
    async with asyncio.TaskGroup() as tasks:
        side = (
            tasks.create_task(_serve_probes(member)),
            tasks.create_task(_watch_bus(member.bus)),
            tasks.create_task(_end_with(member.bus)),
        )
        await serve(member)
        for task in side:
            task.cancel()


async def _serve_probes(member: Member) -> None:
    async def probe() -> None:
        member.vitals.probe_served(time.monotonic())
        metrics.process().tasks.set(len(asyncio.all_tasks()))

    await every(_PROBE_PERIOD_S, probe)


async def _watch_bus(bus: Bus) -> None:
    """Tell of the bus going away and coming back: degraded and handled, not fatal."""
    there = True

    async def look() -> None:
        nonlocal there
        if bus.connected != there:
            there = bus.connected
            (log.info if there else log.warning)("bus_returned" if there else "bus_away")

    await every(_PROBE_PERIOD_S, look)


async def _end_with(bus: Bus) -> None:
    """Fail when the bus is gone for good: a client gave up, or one of our handlers has a bug."""
    await asyncio.wait({bus.closed})
    if reason := bus.closed.result():
        raise reason


def _sole(err: BaseException) -> BaseException:
    """What went wrong, out of the groups that task groups wrap it in."""
    while isinstance(err, BaseExceptionGroup) and len(err.exceptions) == 1:
        err = err.exceptions[0]
    return err


def _report(err: BaseException, *, ever_ready: bool) -> int:
    """Log why the process ends; gives its exit code."""
    if isinstance(err, DiptychError) and not ever_ready:
        log.error("start_failed", error=type(err).__name__, reason=str(err))
        return EXIT_BAD_SETTINGS if isinstance(err, Permanent) else EXIT_FAILED
    log.error("service_failed", error=type(err).__name__, exc_info=err)
    return EXIT_FAILED
