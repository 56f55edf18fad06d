from typing import Any

import msgspec

from diptych_cli import link_pairs
from diptych_cli.checks import Grade
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import FirstToken, HandOffTerms
from diptych_contracts.link_reports import GpuPair, LinksReport, RdmaDevice
from diptych_contracts.transfers import LinkEndpoint
from diptych_testkit.builders import a_worker

TERMS = HandOffTerms(kind="vllm_nixl", engine_version="1", first_token=FirstToken.DECODE)


def worker(name: str, role: Role, *kinds: str, host: str = "host-1") -> WorkerRegistration:
    endpoints = tuple(
        LinkEndpoint(
            kind=kind,
            host="" if kind == "tcp" else host,
            address="x",
            slots=1,
            slot_bytes=1,
            certificate=b"der" if kind == "tcp" else b"",
        )
        for kind in kinds
    )
    made = a_worker(name, role)
    return msgspec.structs.replace(made, endpoints=endpoints, host=host)


def reported(*workers: WorkerRegistration, **facts: Any) -> dict[Any, LinksReport]:
    known = {"nixl_network": "loopback", "numa_nodes": (0,), "numa_count": 1}
    return {
        one.worker: LinksReport(worker=one.worker, host=one.host, **(known | facts))
        for one in workers
    }


def test_a_pair_is_told_its_links_and_what_keeps_it_from_others() -> None:
    prefill = worker("prefill-worker-1", Role.PREFILL, "shm", "nixl", "tcp")
    near = worker("decode-worker-1", Role.DECODE, "shm", "tcp")
    far = worker("decode-worker-2", Role.DECODE, "shm", "nixl", "tcp", host="host-2")

    everybody = reported(prefill, near, far)
    beside, afar = link_pairs.pairs([prefill, near, far], everybody, {})

    assert (beside.grade, beside.advice) == (Grade.FINE, "")
    assert beside.about == "prefill-worker-1 to decode-worker-1"
    assert beside.found == (
        "shm then tcp, same model and layout, memory of one user, codec raw, "
        "nixl: not offered by decode-worker-1"
    )
    assert (afar.grade, afar.found) == (
        Grade.NOTE,
        "tcp, same model and layout, TLS 1.3, codec raw",
    )
    assert afar.advice.startswith("shm: reaches one host only, they are on two; nixl: reaches")


def test_kv_that_differs_is_told_field_by_field() -> None:
    prefill = worker("p-1", Role.PREFILL, "shm")
    decode = worker("d-1", Role.DECODE, "shm")
    layout = msgspec.structs.replace(decode.layout, block_tokens=4096)
    decode = msgspec.structs.replace(decode, layout=layout)

    (told,) = link_pairs.pairs([prefill, decode], reported(prefill, decode), {})

    assert (told.grade, told.found) == (Grade.NOTE, "no link")
    assert told.advice.startswith("KV differs in layout.block_tokens (")


def test_codec_and_seal_are_what_both_agree_on() -> None:
    prefill = worker("p-1", Role.PREFILL, "shm")
    decode = worker("d-1", Role.DECODE, "shm")
    takes = msgspec.structs.replace(decode, codecs=("raw", "int8"))
    asks = reported(prefill, decode, codec="int8", seal=True)

    assert "sealed (AES-256-GCM), codec int8" in link_pairs.pair(prefill, takes, asks).found
    told = link_pairs.pair(prefill, decode, asks).found
    assert "codec raw (int8 is not taken by its reader)" in told
    by_itself = reported(prefill, decode, codec="auto")
    assert "codec by bandwidth, of raw int8" in link_pairs.pair(prefill, takes, by_itself).found


def test_sockets_apart_are_told() -> None:
    prefill = worker("p-1", Role.PREFILL, "shm")
    decode = worker("d-1", Role.DECODE, "shm")
    reports = reported(prefill, numa_nodes=(0,), numa_count=2)
    reports |= reported(decode, numa_nodes=(1,), numa_count=2)

    told = link_pairs.pair(prefill, decode, reports)

    assert told.grade is Grade.NOTE
    assert told.advice.startswith("NUMA nodes [0] and [1]: each byte crosses between sockets")


def test_nixl_that_would_take_tcp_is_told_for_the_worker_it_is() -> None:
    prefill = worker("p-1", Role.PREFILL, "nixl", host="")
    decode = worker("d-1", Role.DECODE, "nixl", host="")
    rdma = (RdmaDevice(name="mlx5_0", numa_node=0),)
    isolated = {"nixl_network": "isolated", "ucx_tls": "rc,tcp", "ucx_net_devices": "mlx5_0:1"}
    reports = reported(prefill, rdma=rdma, **isolated) | reported(decode, **isolated)

    told = link_pairs.pair(prefill, decode, reports)

    assert told.advice == "d-1: no RDMA device here: UCX falls back to TCP without a word"
    assert "in the clear" in told.found
    both = reported(prefill, decode, rdma=rdma, **isolated)
    assert link_pairs.pair(prefill, decode, both).grade is Grade.FINE


def test_another_link_than_expected_is_told() -> None:
    prefill = worker("p-1", Role.PREFILL, "shm", "tcp")
    decode = worker("d-1", Role.DECODE, "shm", "tcp")
    last = {(str(prefill.worker), str(decode.worker)): "tcp"}

    (told,) = link_pairs.pairs([prefill, decode], reported(prefill, decode), last)

    assert told.grade is Grade.NOTE
    assert told.advice.startswith("the last transfer went over tcp: asked for, or shm could not")


def test_engines_that_move_kv_themselves_want_nvlink() -> None:
    prefill = msgspec.structs.replace(worker("p-1", Role.PREFILL), hand_off=TERMS)
    decode = msgspec.structs.replace(worker("d-1", Role.DECODE), hand_off=TERMS)
    bare = reported(prefill, decode, gpu_pairs=(GpuPair(first=0, second=1),))

    told = link_pairs.pair(prefill, decode, bare)

    assert told.found == "engine, same model and layout"
    assert told.advice.startswith("no NVLink between 1 of its host's pairs of GPUs")


def test_a_worker_that_does_not_answer_is_told_of() -> None:
    prefill = worker("p-1", Role.PREFILL, "shm")
    decode = worker("d-1", Role.DECODE, "shm")
    told = link_pairs.pair(prefill, decode, reported(prefill))
    assert "does not say what it runs on" in told.advice
    lines = list(link_pairs.workers([prefill, decode], reported(prefill)))
    assert "NUMA 0 of 1" in lines[0]
    assert lines[1].endswith("does not answer")
