"""Where a request runs: `remote` whenever a compatible prefill and decode worker are there.

Among workers with room the least loaded wins; ties go to the one chosen longest ago, so that equal
workers share the work. A prefill worker's load is the prompt tokens it has to compute, those of
this request included that it has not cached: so a prefix attracts its kind, until the queue before
it costs more than computing it elsewhere, and then there are two that have it. Of decode workers
that have equally much to do, the one that has most of the prompt's KV is sent the least of it.

A prompt that would not fit into a decode worker's transfer slots, all of them, is never handed over
to it: where that leaves no pair, one worker does both phases. Workers whose engines move KV
themselves pair if model and terms are equal; prompts of any length are handed over then.

Where every decode worker is full, one that can park the KV until it has a seat may be given the
request all the same; whether it is, `paths` says. Engines that move KV themselves park nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import LINK as ENGINE_LINK
from diptych_contracts.handoffs import HandOffTerms
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import Assignment, Forced, KvPath, Mode
from diptych_contracts.transfers import MAX_TRANSFER_BLOCKS
from diptych_contracts.wire import Message
from diptych_policy.fleet import Fleet, Worker
from diptych_policy.paths import Crossing, PathChoice, choose_path, parking_of
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
    deployment: KvPath | None = None
    """The path an operator forces, unless the request names one."""
    ttft_slo_s: float = 0.0
    """Within which its answer should begin and go on; 0: not said."""

    @property
    def path(self) -> KvPath | None:
        """The path it must take, if that is said; a request's own mode goes before a setting."""
        if self.forced.path is not None or self.forced.mode is Mode.LOCAL:
            return self.forced.path
        if self.forced.mode is Mode.REMOTE and self.deployment is KvPath.COLOCATED:
            return None
        return self.deployment

    @property
    def mode(self) -> Mode | None:
        """Where its phases must run, if that is said."""
        if self.forced.mode is not None or self.path is None:
            return self.forced.mode
        return Mode.LOCAL if self.path is KvPath.COLOCATED else Mode.REMOTE

    @property
    def apart(self) -> bool:
        """Whether nobody else may be put beside it."""
        return self.company is not Company.ANY


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Nobody can take it now. `reason` is for the client, if it stays so."""

    reason: str


def differing_fields(prefill: WorkerRegistration, decode: WorkerRegistration) -> list[str]:
    """In what the KV of two workers differs, so that it cannot be handed over; empty: in nothing.

    Each with what either has: `layout.block_tokens (16, 64)`. Engines that move KV themselves bring
    their layouts together; they must have the same terms.
    """
    pairs: list[tuple[str, Message, Message]] = [
        ("fingerprint", prefill.fingerprint, decode.fingerprint)
    ]
    if prefill.hand_off is not None and decode.hand_off is not None:
        pairs.append(("hand_off", prefill.hand_off, decode.hand_off))
    elif prefill.hand_off is None and decode.hand_off is None:
        pairs.append(("layout", prefill.layout, decode.layout))
    else:
        return [f"hand_off ({_told(prefill.hand_off)}, {_told(decode.hand_off)})"]
    return [
        f"{what}.{name} ({getattr(ours, name)!r}, {getattr(theirs, name)!r})"
        for what, ours, theirs in pairs
        if ours != theirs
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _told(terms: HandOffTerms | None) -> str:
    return "over KV links" if terms is None else f"by {terms.kind}"


def strangers(offer: WorkerRegistration, fleet: Fleet) -> dict[Incarnation, list[str]]:
    """The registered workers that no KV can be handed to or taken from, and what differs."""
    found = {}
    for other in fleet.offers(offer.model):
        if other.role is not offer.role and (fields := differing_fields(offer, other)):
            found[other.worker] = fields
    return found


def links_between(prefill: WorkerRegistration, decode: WorkerRegistration) -> list[str]:
    """KV links over which `prefill` can write into `decode`, fastest first.

    A worker writes over the kinds it offers itself. An endpoint that names a host reaches no
    further: shared memory always does, a listener on loopback too. Engines that move KV themselves
    have one link, `engine`, with their like.
    """
    if differing_fields(prefill, decode):
        return []
    if decode.hand_off is not None:
        return [ENGINE_LINK]
    spoken = {endpoint.kind for endpoint in prefill.endpoints}
    return [
        endpoint.kind
        for endpoint in decode.endpoints
        if endpoint.kind in spoken and endpoint.host in ("", prefill.host)
    ]


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
    if demand.mode is Mode.LOCAL:
        return _local(demand, fleet, decodes, prefills, why="as was asked")
    ready = [worker for worker in prefills if worker.id not in demand.excluded]
    if demand.mode is Mode.REMOTE or _pairs(demand, ready, decodes):
        return _remote(demand, fleet, prefills, decodes)
    return _local(demand, fleet, decodes, prefills, why="no pair can hand its KV over")


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
    demand: Demand, fleet: Fleet, decodes: list[Worker], prefills: list[Worker], *, why: str
) -> Assignment | Unplaced:
    tokens = demand.prompt_tokens + demand.answer_tokens
    pool = _open(demand, fleet, decodes or prefills)
    worker = _least_loaded(pool, tokens, demand.excluded, lambda worker: (worker.sequences,))
    if worker is None:
        return Unplaced("every worker is full")
    return Assignment(
        mode=Mode.LOCAL,
        decode=worker.id,
        apart=demand.apart,
        path=KvPath.COLOCATED,
        path_reason=why,
    )


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
        return Unplaced(
            f"no prefill worker can hand the KV of {demand.prompt_tokens} tokens to a decode worker"
            f"{_why_apart(prefills, decodes)}"
        )
    peers = _open(demand, fleet, {decode.id: decode for _, decode, _ in pairs}.values())
    decode, choice = _decode_for(demand, fleet, peers, [p for p, _, _ in pairs])
    if decode is None or choice.waits:
        return Unplaced("every decode worker is full")
    if choice.path is KvPath.COLOCATED:
        return _local(demand, fleet, [decode], [], why=choice.reason)
    links = {prefill.id: links for prefill, peer, links in pairs if peer is decode}
    prefill = _least_loaded(
        _open(demand, fleet, [worker for worker in prefills if worker.id in links]),
        demand.prompt_tokens,
        demand.excluded,
        lambda worker: (
            worker.prefill_backlog_tokens
            + fleet.prefill_tokens(worker.id, demand.prompt, demand.prompt_tokens),
        ),
    )
    if prefill is None:
        return Unplaced("every prefill worker is full")
    link, next_link, last_link = (*links[prefill.id], None, None)[:3]
    return Assignment(
        mode=Mode.REMOTE,
        prefill=prefill.id,
        decode=decode.id,
        link=link,
        next_link=next_link,
        last_link=last_link,
        apart=demand.apart,
        path=choice.path,
        path_reason=choice.reason,
    )


def _decode_for(
    demand: Demand, fleet: Fleet, peers: list[Worker], prefills: list[Worker]
) -> tuple[Worker | None, PathChoice]:
    """The decode worker of `peers` that takes it, and by which path; none: it waits."""
    forced = demand.path
    kind = parking_of(forced)
    if forced is not None and kind and (parked := _parkable(demand, peers, kind)):
        return min(parked, key=_load), PathChoice(forced, "as was asked")
    tokens = demand.prompt_tokens + demand.answer_tokens
    decode = _least_loaded(
        peers,
        tokens,
        demand.excluded,
        lambda worker: (worker.sequences, _lacking_tokens(demand, fleet, worker)),
    )
    if decode is not None:
        if kind:
            return decode, PathChoice(KvPath.DIS_GPU, f"nobody has room on {kind} to park it")
        if forced is not None or demand.mode is Mode.REMOTE:
            return decode, PathChoice(KvPath.DIS_GPU, "as was asked")
        return decode, choose_path(_crossing(demand, fleet, decode, prefills))
    roomy = _parkable(demand, peers, None)
    if not roomy or kind or forced is KvPath.DIS_GPU or demand.company is not Company.ANY:
        return None, PathChoice(KvPath.DIS_GPU, "it waits for a seat", waits=True)
    decode = min(roomy, key=_load)
    return decode, choose_path(_crossing(demand, fleet, decode, prefills))


def _lacking_tokens(demand: Demand, fleet: Fleet, decode: Worker) -> int:
    """Of how many prompt tokens the KV would have to be sent to `decode`."""
    if not decode.registration.kv_reuse:
        return demand.prompt_tokens
    return fleet.prefill_tokens(decode.id, demand.prompt, demand.prompt_tokens)


def _parkable(demand: Demand, peers: list[Worker], kind: str | None) -> list[Worker]:
    """Those of `peers` that have room to park it, on `kind` (None: anywhere)."""
    tokens = demand.prompt_tokens + demand.answer_tokens
    return [
        worker
        for worker in peers
        if worker.id not in demand.excluded
        and tokens <= worker.registration.kv_tokens
        and worker.registration.hand_off is None
        and any(
            place.free_bytes >= worker.kv_bytes(demand.prompt_tokens)
            for where, place in worker.parking_places.items()
            if kind in (None, where)
        )
    ]


def _load(worker: Worker) -> tuple[int, int]:
    return worker.sequences, worker.last_chosen


def _crossing(demand: Demand, fleet: Fleet, decode: Worker, prefills: list[Worker]) -> Crossing:
    rates = [p.load.kv_bytes_per_s for p in prefills if p.load and p.load.kv_bytes_per_s]
    prefilling_s = [
        p.prefill_token_s * fleet.prefill_tokens(p.id, demand.prompt, demand.prompt_tokens)
        for p in prefills
    ]
    return Crossing(
        kv_bytes=decode.kv_bytes(demand.prompt_tokens),
        seat_free=decode.has_room(demand.prompt_tokens + demand.answer_tokens),
        seat_wait_s=decode.seat_wait_s,
        link_bytes_per_s=max(rates, default=0.0),
        prefill_s=min(prefilling_s, default=0.0),
        places=decode.parking_places,
        ttft_slo_s=demand.ttft_slo_s,
    )


def _why_apart(prefills: list[Worker], decodes: list[Worker]) -> str:
    """What differs, where that is what keeps every pair apart."""
    fields = [
        differing_fields(prefill.registration, decode.registration)
        for prefill in prefills
        for decode in decodes
    ]
    if not fields or not all(fields):
        return ""
    nearest = min(fields, key=lambda differing: len(differing))
    return f": their KV differs in {', '.join(nearest)}"


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
    cost: Callable[[Worker], tuple[int, ...]],
) -> Worker | None:
    able = [w for w in workers if w.id not in excluded and w.has_room(tokens)]
    return min(able, key=lambda w: (cost(w), w.last_chosen), default=None)
