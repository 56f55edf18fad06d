"""Files and batches, put together: their routes, and what runs beside them."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from starlette.routing import Route

from diptych_bus.port import Bus
from diptych_chassis.member import Member
from diptych_contracts.batches import BatchRecord, LineResult
from diptych_contracts.streams import BATCH_RESULTS, BATCHES
from diptych_gateway.batches.line_calls import Endpoint, LineCalls, refusing_streams
from diptych_gateway.batches.runner import BatchRunner
from diptych_gateway.batches.running import BatchParts
from diptych_gateway.batches.serving import Batches
from diptych_gateway.batches.writing import OutputFiles
from diptych_gateway.completions.chat import ChatCompletions
from diptych_gateway.completions.text import Completions
from diptych_gateway.completions.text_checks import check_completion, decode_completion
from diptych_gateway.files.board import Board
from diptych_gateway.files.serving import Files
from diptych_gateway.files.store import FileStore
from diptych_gateway.idempotency.claims import Claims
from diptych_gateway.judging.bodies import decode
from diptych_gateway.judging.checking import check
from diptych_gateway.keeping.records import Records
from diptych_gateway.listening.intake import Intake
from diptych_gateway.responses.bodies import decode_response
from diptych_gateway.responses.checking import check_response
from diptych_gateway.responses.serving import Answering, Responses
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.texts.embedding import Embeddings
from diptych_gateway.texts.embedding_bodies import judge_embeddings

FILES_PATH = "/v1/files"
ONE_FILE = f"{FILES_PATH}/{{file_id}}"
FILE_CONTENT = f"{ONE_FILE}/content"
BATCHES_PATH = "/v1/batches"
ONE_BATCH = f"{BATCHES_PATH}/{{batch_id}}"
CANCEL_BATCH = f"{ONE_BATCH}/cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRoom:
    """The handlers, the boards they read, and the runner."""

    files: Files
    batches: Batches
    runner: BatchRunner

    async def start(self) -> None:
        """Learn which files and batches there are."""
        await self.files.store.board.start()
        await self.batches.board.start()

    async def close(self) -> None:
        """Hear no more."""
        await self.batches.board.close()
        await self.files.store.board.close()

    def routes(self) -> list[Route]:
        """All paths."""
        files, batches = self.files, self.batches
        return [
            Route(FILES_PATH, Answering(files.create), methods=["POST"]),
            Route(FILES_PATH, Answering(files.list), methods=["GET"]),
            Route(ONE_FILE, Answering(files.retrieve), methods=["GET"]),
            Route(ONE_FILE, Answering(files.delete), methods=["DELETE"]),
            Route(FILE_CONTENT, Answering(files.content), methods=["GET"]),
            Route(BATCHES_PATH, Answering(batches.create), methods=["POST"]),
            Route(BATCHES_PATH, Answering(batches.list), methods=["GET"]),
            Route(ONE_BATCH, Answering(batches.retrieve), methods=["GET"]),
            Route(CANCEL_BATCH, Answering(batches.cancel), methods=["POST"]),
        ]


def batch_endpoints(
    chat: ChatCompletions,
    completions: Completions,
    responses: Responses,
    embeddings: Embeddings,
) -> Mapping[str, Endpoint]:
    """What batches may call."""
    return {
        "/v1/chat/completions": Endpoint(chat, refusing_streams(lambda body: check(decode(body)))),
        "/v1/completions": Endpoint(
            completions,
            refusing_streams(lambda body: check_completion(decode_completion(body))),
        ),
        "/v1/responses": Endpoint(
            Answering(responses.create),
            refusing_streams(lambda body: check_response(decode_response(body))),
        ),
        "/v1/embeddings": Endpoint(
            Answering(embeddings.create), refusing_streams(judge_embeddings)
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What the room shares with others."""

    intake: Intake
    claims: Claims
    records: Records
    executor: Executor
    reasons: Callable[[], list[str]]


def batch_room(
    member: Member,
    settings: GatewaySettings,
    endpoints: Mapping[str, Endpoint],
    shared: Neighbours,
) -> BatchRoom:
    """The room; `endpoints` are what batches may call."""
    bus = member.bus
    store = FileStore(bus)
    board = Board(bus, BATCHES, BatchRecord)
    return BatchRoom(
        files=_files(member, settings, store),
        batches=Batches(
            board=board,
            files=store,
            intake=shared.intake,
            endpoints=endpoints.keys(),
            rng=member.rng,
            unix_ms=bus.unix_ms,
            window_s=settings.batch_window_s,
            max_open=settings.max_open_batches,
        ),
        runner=BatchRunner(
            bus=bus,
            me=member.incarnation,
            board=board,
            parts=_parts(settings, store, LineCalls(endpoints, rng=member.rng), shared, bus=bus),
            at_once=settings.batches_at_once,
            stopping=member.stopping,
            ready=lambda: not shared.reasons(),
        ),
    )


def _files(member: Member, settings: GatewaySettings, store: FileStore) -> Files:
    return Files(
        store=store,
        rng=member.rng,
        unix_ms=member.bus.unix_ms,
        max_bytes=settings.max_file_bytes,
        silence_s=settings.body_s,
        max_uploads=settings.max_uploads,
        max_downloads=settings.max_downloads,
        slow_reader_s=settings.slow_reader_s,
        max_files=settings.max_files,
        max_stored_bytes=settings.max_stored_bytes,
    )


def _parts(
    settings: GatewaySettings, store: FileStore, calls: LineCalls, shared: Neighbours, *, bus: Bus
) -> BatchParts:
    results = bus.bucket(BATCH_RESULTS, LineResult)
    output = OutputFiles(
        files=store,
        results=results,
        claims=shared.claims,
        records=shared.records,
        unix_ms=bus.unix_ms,
    )
    return BatchParts(
        files=store,
        results=results,
        calls=calls,
        output=output,
        executor=shared.executor,
        in_flight=settings.batch_in_flight,
        max_lines=settings.max_batch_lines,
        max_line_bytes=settings.max_body_bytes,
    )
