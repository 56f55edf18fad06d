"""The gateway's shell: follow the journal, serve, tick, drain. It decides nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from diptych_chassis.draining import Drain
from diptych_chassis.member import Member
from diptych_gateway.admission.admitting import Door
from diptych_gateway.admission.models import Models
from diptych_gateway.batches.room import BatchRoom
from diptych_gateway.idempotency.claims import Claims
from diptych_gateway.keeping.archive import Archive
from diptych_gateway.keeping.in_flight import InFlight
from diptych_gateway.keeping.records import Records
from diptych_gateway.keeping.resuming import Resumption
from diptych_gateway.listening.server import HttpServer
from diptych_gateway.tenancy.allowances import Allowances
from diptych_gateway.tenancy.keyring import Keyring
from diptych_gateway.tenancy.metering import Metering
from diptych_gateway.texts.embedders import Embedders
from diptych_policy.admission import Admission
from diptych_telemetry import logger

TICK_S = 0.25
_LAST_WORDS_S = 1.0
"""After the drain, for each of: ends, marks and archived responses. With the server's own last
words they fit into what the chassis grants beyond `drain_s`."""
_LEAVING_S = 1.0
"""How long connections made before the port was left may take to send their request."""

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """One life of a gateway."""

    member: Member
    server: HttpServer
    models: Models
    embedders: Embedders
    in_flight: InFlight
    records: Records
    archive: Archive
    claims: Claims
    batch_room: BatchRoom
    resumption: Resumption
    keyring: Keyring
    allowances: Allowances
    metering: Metering
    admission: Admission
    door: Door
    reasons: Callable[[], list[str]]
    drain_s: float

    async def run(self) -> None:
        """Serve until the member stops."""
        await self.keyring.start()
        self.server.bind()
        try:
            await self._follow_and_serve()
        finally:
            self.server.close()
            await self.keyring.close()

    async def _follow_and_serve(self) -> None:
        journal = await self.member.bus.follow(self.member.incarnation, self.in_flight.dispatch)
        try:
            await self.models.start()
            await self.embedders.start()
            await self.resumption.start()
            await self.door.start()
            await self.batch_room.start()
            await self._serve()
        finally:
            await self.batch_room.close()
            await self.door.close()
            await self.resumption.close()
            await self.embedders.close()
            await self.models.close()
            await journal.close()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(self.server.run())
            others = [
                tasks.create_task(work())
                for work in (
                    self.models.run,
                    self.records.run,
                    self.archive.run,
                    self.claims.run,
                    self.batch_room.runner.run,
                    self.resumption.run,
                    self.allowances.run,
                    self.metering.run,
                    self._tick,
                )
            ]
            log.info("gateway_listening", port=self.server.port)
            try:
                await self.member.stopping.wait()
            except asyncio.CancelledError:  # the process ends by a failure: its clients are told
                self.in_flight.fail_all("this gateway has failed", code="unavailable")
                await self.in_flight.emptied(_LAST_WORDS_S)
                raise
            await self._drain()
            self.server.stop()
            await server
            await asyncio.gather(
                self.records.settled(_LAST_WORDS_S),
                self.archive.settled(_LAST_WORDS_S),
                self.claims.settled(_LAST_WORDS_S),
                self.allowances.give_back(_LAST_WORDS_S),
            )
            for task in others:
                task.cancel()

    async def _drain(self) -> None:
        drain = Drain(self.member, self.drain_s)
        if self.server.reuse_port:
            self.server.leave()
            await asyncio.sleep(min(_LEAVING_S, drain.left_s))
            self.server.hang_up()
        self.admission.draining = True
        log.info("gateway_draining", in_flight=len(self.in_flight))
        while (left := len(self.in_flight)) and drain.left_s:
            drain.tell(left)
            await self.in_flight.emptied(min(TICK_S, drain.left_s))
        while (embedding := len(self.embedders)) and drain.left_s:
            drain.tell(left + embedding)
            await asyncio.sleep(min(TICK_S, drain.left_s))
        if left:
            log.warning("drain_cut_off", in_flight=left)
            self.in_flight.fail_all("this gateway is shutting down")
            await self.in_flight.emptied(_LAST_WORDS_S)
        await drain.done(left=left)

    async def _tick(self) -> None:
        last_s = self.member.now_s()
        while True:
            self._report()
            await asyncio.sleep(TICK_S)
            now_s = self.member.now_s()
            # After a freeze of this process nobody else has been silent for that long.
            elapsed_s = min(now_s - last_s, 2 * TICK_S)
            last_s = now_s
            self.in_flight.tick(elapsed_s, connected=self.member.bus.connected)

    def _report(self) -> None:
        if self.member.stopping.is_set():  # the drain tells how far it is
            return
        reasons = self.reasons()
        self.member.ready(not reasons, ", ".join(reasons))
