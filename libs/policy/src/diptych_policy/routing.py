"""Where a request runs: `remote` whenever a compatible prefill and decode worker are there.

Among workers with room the least loaded wins; ties go to the one chosen longest ago, so that equal
workers share the work. A prefill worker's load is the prompt tokens it has to compute, those of
this request included that it has not cached: so a prefix attracts its kind, until the queue before
it costs more than computing it elsewhere, and then there are two that have it.

A prompt that would not fit into a decode worker's transfer slots, all of them, is never handed over
to it: where that leaves no pair, one worker does both phases. Workers whose engines move KV
themselves pair if model and terms are equal; prompts of any length are handed over then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import LINK as ENGINE_LINK
from diptych_contracts.handoffs import HandOffTerms
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Assignment, Forced, Mode
from diptych_contracts.transfers import MAX_TRANSFER_BLOCKS
from diptych_policy.fleet import Fleet, Worker
from diptych_policy.prefixes import PromptBlocks

UNFORCED = Forced()
NOBODY = RequestId("")


class Company(Enum):
    """Beside whom a request may run."""

    NONE = auto()
    PROVEN = auto()
    """Requests that get on where they are."""
    ANY = auto()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of its workers."""

    model: str
    prompt_tokens: int
    """Prompt and delivered answer: what must be prefilled."""
    answer_tokens: int
    """Most tokens still to come."""
    forced: Forced = UNFORCED
    excluded: frozenset[Incarnation] = frozenset()
    """Workers that said no a moment ago."""
    prompt: PromptBlocks = field(default_factory=lambda: PromptBlocks("", ()))
    """What it begins with, for whoever has that cached."""
    request_id: RequestId = NOBODY
    company: Company = Company.ANY
    unproven: frozenset[Incarnation] = frozenset()
    """Workers that hold requests of which nobody knows yet whether they get on."""

    @property
    def apart(self) -> bool:
        """Whether nobody else may be put beside it."""
        return self.company is not Company.ANY


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Nobody can take it now. `reason` is for the client, if it stays so."""

    reason: str


def links_between(prefill: WorkerRegistration, decode: WorkerRegistration) -> list[str]:
    """KV links over which `prefill` can write into `decode`, fastest first.

    A worker writes over the kinds it offers itself. An endpoint that names a host reaches no
    further: shared memory always does, a listener on loopback too. Engines that move KV themselves
    have one link, `engine`, with their like.
    """
    if obstacle(prefill, decode):
        return []
    if decode.hand_off is not None:
        return [ENGINE_LINK]
    spoken = {endpoint.kind for endpoint in prefill.endpoints}
    return [
        endpoint.kind
        for endpoint in decode.endpoints
        if endpoint.kind in spoken and endpoint.host in ("", prefill.host)
    ]


def obstacle(prefill: WorkerRegistration, decode: WorkerRegistration) -> str:
    """Why `prefill` can never hand over to `decode`, whatever links there are; empty: it can."""
    ours, theirs = prefill.hand_off, decode.hand_off
    if prefill.fingerprint != decode.fingerprint:
        return f"weights {prefill.fingerprint.weights} and {decode.fingerprint.weights} differ"
    if ours != theirs:
        return f"{_told(ours)} and {_told(theirs)} do not pair"
    if ours is None and prefill.layout != decode.layout:
        return f"KV of {prefill.layout.engine_build} and {decode.layout.engine_build} differs"
    return ""


def lonely(worker: WorkerRegistration, fleet: Fleet) -> str:
    """Why no worker of the other role can work with `worker`; empty: one can, or there is none."""
    reasons = []
    for peer in fleet.peers(worker):
        prefill, decode = (worker, peer) if worker.role is Role.PREFILL else (peer, worker)
        if not (reason := obstacle(prefill, decode)):
            return ""
        reasons.append(f"{peer.worker}: {reason}")
    return reasons[0] if reasons else ""


def _told(terms: HandOffTerms | None) -> str:
    return "KV links" if terms is None else f"{terms.kind} {terms.engine_version}"


def transferable_tokens(decode: WorkerRegistration, link: str) -> int:
    """Longest context that can be handed over to `decode` over `link`, with all slots free."""
    if link == ENGINE_LINK:
        return decode.context_tokens
    slots = max((e.slots for e in decode.endpoints if e.kind == link), default=0)
    return min(slots, MAX_TRANSFER_BLOCKS) * decode.layout.block_tokens


def choose(demand: Demand, fleet: Fleet) -> Assignment | Unplaced:
    """The workers for one attempt, or why there are none."""
    prefills = list(fleet.usable(demand.model, Role.PREFILL))
    decodes = list(fleet.usable(demand.model, Role.DECODE))
    if not prefills and not decodes:
        return Unplaced(f"no worker serves {demand.model!r} at the moment")
    if demand.forced.mode is Mode.LOCAL:
        return _local(demand, fleet, decodes, prefills)
    ready = [worker for worker in prefills if worker.id not in demand.excluded]
    if demand.forced.mode is Mode.REMOTE or _pairs(demand, ready, decodes):
        return _remote(demand, fleet, prefills, decodes)
    return _local(demand, fleet, decodes, prefills)


def soonest_idle(demand: Demand, fleet: Fleet) -> list[Incarnation]:
    """Of each role the worker that does the least, where there are others to do it meanwhile.

    One that only waits for its company to prove itself holds up a sole worker too: for moments.
    """
    found = []
    for role in Role:
        workers = [
            w for w in fleet.usable(demand.model, role) if fleet.free_for(demand.request_id, w.id)
        ]
        if len(workers) > 1 or (workers and demand.company is Company.PROVEN):
            found.append(min(workers, key=lambda w: (w.sequences, w.id)).id)
    return found


def _local(
    demand: Demand, fleet: Fleet, decodes: list[Worker], prefills: list[Worker]
) -> Assignment | Unplaced:
    tokens = demand.prompt_tokens + demand.answer_tokens
    pool = _open(demand, fleet, decodes or prefills)
    worker = _least_loaded(pool, tokens, demand.excluded, lambda worker: worker.sequences)
    if worker is None:
        return Unplaced("every worker is full")
    return Assignment(mode=Mode.LOCAL, decode=worker.id, apart=demand.apart)


def _open(demand: Demand, fleet: Fleet, workers: Iterable[Worker]) -> list[Worker]:
    """Those of `workers` that it may be put on: they hold only such company as it may have."""
    return [
        worker
        for worker in workers
        if fleet.free_for(demand.request_id, worker.id) and _fit_company(demand, worker)
    ]


def _fit_company(demand: Demand, worker: Worker) -> bool:
    match demand.company:
        case Company.NONE:
            return worker.sequences == 0
        case Company.PROVEN:
            return worker.id not in demand.unproven
        case Company.ANY:
            return True


def _remote(
    demand: Demand, fleet: Fleet, prefills: list[Worker], decodes: list[Worker]
) -> Assignment | Unplaced:
    pairs = _pairs(demand, prefills, decodes)
    if not pairs:
        return Unplaced(_unpaired(demand, prefills, decodes))
    decode = _least_loaded(
        _open(demand, fleet, {decode.id: decode for _, decode, _ in pairs}.values()),
        demand.prompt_tokens + demand.answer_tokens,
        demand.excluded,
        lambda worker: worker.sequences,
    )
    if decode is None:
        return Unplaced("every decode worker is full")
    links = {prefill.id: links for prefill, peer, links in pairs if peer is decode}
    prefill = _least_loaded(
        _open(demand, fleet, [worker for worker in prefills if worker.id in links]),
        demand.prompt_tokens,
        demand.excluded,
        lambda worker: (
            worker.prefill_backlog_tokens
            + fleet.prefill_tokens(worker.id, demand.prompt, demand.prompt_tokens)
        ),
    )
    if prefill is None:
        return Unplaced("every prefill worker is full")
    link, next_link = (*links[prefill.id], None)[:2]
    return Assignment(
        mode=Mode.REMOTE,
        prefill=prefill.id,
        decode=decode.id,
        link=link,
        next_link=next_link,
        apart=demand.apart,
    )


def _unpaired(demand: Demand, prefills: list[Worker], decodes: list[Worker]) -> str:
    """Why no two of them can work together: what a person has to change, if it is that."""
    why = f"no prefill worker can hand the KV of {demand.prompt_tokens} tokens to a decode worker"
    for prefill in prefills:
        for decode in decodes:
            if reason := obstacle(prefill.registration, decode.registration):
                return f"{why}: {reason} ({prefill.id}, {decode.id})"
    return why


def _pairs(
    demand: Demand, prefills: list[Worker], decodes: list[Worker]
) -> list[tuple[Worker, Worker, list[str]]]:
    """Every (prefill, decode, links) that can work together."""
    wanted = demand.forced.link
    found = []
    for prefill in prefills:
        for decode in decodes:
            common = links_between(prefill.registration, decode.registration)
            links = [
                link
                for link in common
                if wanted in (None, link)
                and demand.prompt_tokens <= transferable_tokens(decode.registration, link)
            ]
            if links:
                found.append((prefill, decode, links))
    return found


def _least_loaded(
    workers: Iterable[Worker],
    tokens: int,
    excluded: frozenset[Incarnation],
    cost: Callable[[Worker], int],
) -> Worker | None:
    able = [w for w in workers if w.id not in excluded and w.has_room(tokens)]
    return min(able, key=lambda w: (cost(w), w.last_chosen), default=None)
