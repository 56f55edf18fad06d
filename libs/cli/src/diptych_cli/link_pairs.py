"""Which link each pair of a running stack's workers takes, what happens to KV on it, and why."""

from collections.abc import Iterator, Mapping, Sequence

from diptych_cli.checks import Finding, Grade
from diptych_cli.link_checks import far_devices, silent_tcp
from diptych_contracts.codecs import RAW
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import LINK as ENGINE
from diptych_contracts.ids import Incarnation
from diptych_contracts.link_reports import LinksReport
from diptych_contracts.transfers import LinkEndpoint
from diptych_policy.codecs import AUTO
from diptych_policy.routing import differing_fields, links_between

_KINDS = ("shm", "nixl", "tcp")
_NOBODY = LinksReport(worker=Incarnation(""))

Reports = Mapping[Incarnation, LinksReport]
LastUsed = Mapping[tuple[str, str], str]
"""By writer and reader, the link of the last transfer between them."""


def pairs(
    registrations: Sequence[WorkerRegistration], reports: Reports, last_used: LastUsed
) -> Iterator[Finding]:
    """Each pair that could hand over, with its link and the reason for it."""
    for prefill in registrations:
        for decode in registrations:
            if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE):
                last = last_used.get((prefill.worker, decode.worker), "")
                yield pair(prefill, decode, reports, last=last)


def pair(
    prefill: WorkerRegistration, decode: WorkerRegistration, reports: Reports, *, last: str = ""
) -> Finding:
    """What KV of `prefill` takes to `decode`."""
    links = links_between(prefill, decode)
    about = f"{prefill.worker} to {decode.worker}"
    why = list(_not_taken(prefill, decode))
    if not links:
        differing = differing_fields(prefill, decode)
        if differing:
            why = [f"KV differs in {', '.join(differing)}"]
        return Finding(Grade.NOTE, about, "no link", "; ".join(why) or "nothing in common")
    ours, theirs = (reports.get(w.worker, _NOBODY) for w in (prefill, decode))
    endpoint = next((e for e in decode.endpoints if e.kind == links[0]), None)
    found = [" then ".join(links), "same model and layout"]
    if endpoint is not None:
        found += [_secrecy(endpoint, ours, theirs), _codec(decode, ours)]
    worries = list(_worries(links[0], prefill, decode, ours=ours, theirs=theirs))
    if last and last != links[0]:
        worries.append(
            f"the last transfer went over {last}: asked for, or {links[0]} could not be opened "
            "(diptych kv trace tells)"
        )
    if not reports.keys() >= {prefill.worker, decode.worker}:
        worries.append("does not say what it runs on: a worker of an older version, or gone")
    if links[0] == "tcp":
        worries.append("; ".join(why) or "the fastest either offers")
    elif why:
        found.append("; ".join(why))
    grade = Grade.NOTE if worries else Grade.FINE
    return Finding(grade, about, ", ".join(found), "; ".join(worries))


def _worries(
    link: str,
    prefill: WorkerRegistration,
    decode: WorkerRegistration,
    *,
    ours: LinksReport,
    theirs: LinksReport,
) -> Iterator[str]:
    together = prefill.host == decode.host
    if link == "nixl":
        for report in (ours, theirs):
            if (reason := silent_tcp(report)) and report.worker:
                yield f"{report.worker}: {reason}"
    if together and link in ("shm", "nixl") and _apart(ours.numa_nodes, theirs.numa_nodes):
        yield (
            f"NUMA nodes {list(ours.numa_nodes)} and {list(theirs.numa_nodes)}: each byte crosses "
            "between sockets; pin both to one node"
        )
    if link in ("nixl", ENGINE) and not together:
        for report in (ours, theirs):
            if away := far_devices(report):
                yield f"{report.worker}: {', '.join(away)} on another NUMA node than it runs on"
    bare = [pair for pair in theirs.gpu_pairs if not pair.nvlink]
    if link == ENGINE and together and bare:
        yield f"no NVLink between {len(bare)} of its host's pairs of GPUs: KV goes through PCIe"


def _apart(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    return bool(ours and theirs) and not set(ours) & set(theirs)


def _secrecy(endpoint: LinkEndpoint, ours: LinksReport, theirs: LinksReport) -> str:
    """What guards KV on its way."""
    if endpoint.certificate:
        return "TLS 1.3"
    if ours.seal or theirs.seal:
        return "sealed (AES-256-GCM)"
    return "memory of one user" if endpoint.kind == "shm" else "in the clear"


def _codec(decode: WorkerRegistration, ours: LinksReport) -> str:
    """How blocks are encoded, as the writer asks and the reader takes."""
    if ours.codec == AUTO:
        return f"codec by bandwidth, of {' '.join(decode.codecs)}"
    if ours.codec and ours.codec not in decode.codecs:
        return f"codec {RAW} ({ours.codec} is not taken by its reader)"
    return f"codec {ours.codec or RAW}"


def _not_taken(prefill: WorkerRegistration, decode: WorkerRegistration) -> Iterator[str]:
    if decode.hand_off is not None:
        return
    offered = {endpoint.kind: endpoint for endpoint in decode.endpoints}
    spoken = {endpoint.kind for endpoint in prefill.endpoints}
    for kind in _KINDS:
        if kind not in offered or kind not in spoken:
            who = " nor ".join(
                worker.worker
                for worker, kinds in ((prefill, spoken), (decode, set(offered)))
                if kind not in kinds
            )
            yield f"{kind}: not offered by {who}"
        elif offered[kind].host not in ("", prefill.host):
            yield f"{kind}: reaches one host only, they are on two"


def workers(registrations: Sequence[WorkerRegistration], reports: Reports) -> Iterator[str]:
    """A line for each worker: what it offers, and where it runs."""
    for worker in registrations:
        links = " ".join(endpoint.kind for endpoint in worker.endpoints) or "none"
        if worker.hand_off is not None:
            links = f"by {worker.hand_off.kind}"
        told = [f"links {links}", f"host {worker.host[:12] or 'not said'}"]
        report = reports.get(worker.worker)
        if report is None:
            told.append("does not answer")
        else:
            nodes = " ".join(map(str, report.numa_nodes)) or "?"
            told += [
                f"process {report.pid}",
                f"NUMA {nodes} of {report.numa_count or 1}",
                f"RDMA {' '.join(d.name for d in report.rdma) or 'none'}",
                f"UCX_TLS {report.ucx_tls or 'not set'}",
                f"UCX_NET_DEVICES {report.ucx_net_devices or 'not set'}",
                f"codec {report.codec or RAW}, takes {' '.join(worker.codecs)}",
            ]
            if report.nixl_missing:
                told.append(f"no nixl: {report.nixl_missing}")
        yield f"{worker.worker} ({worker.role}): {', '.join(told)}"
