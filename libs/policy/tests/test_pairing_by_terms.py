"""Workers whose engines move KV themselves pair if model, weights and terms are equal."""

import msgspec
import pytest

from diptych_contracts.cards import Fingerprint
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import LINK, FirstToken, HandOffTerms
from diptych_contracts.requests import Assignment, Forced, KvPath, Mode
from diptych_policy.fleet import Fleet
from diptych_policy.routing import Demand, Unplaced, choose, links_between, strangers
from diptych_testkit.builders import LAYOUT, MODEL, a_worker

TERMS = HandOffTerms(kind="vllm_nixl", engine_version="0.32.0", first_token=FirstToken.DECODE)
NO_SLOTS = msgspec.structs.replace(LAYOUT, slot_bytes=0)


def a_worker_of(
    name: str, role: Role, terms: HandOffTerms | None = TERMS, **changes: object
) -> WorkerRegistration:
    values = {"hand_off": terms, "endpoints": (), "layout": NO_SLOTS, "context_tokens": 10**6}
    return a_worker(name, role, **(values | {"kv_tokens": 10**7} | changes))


P, D = a_worker_of("p", Role.PREFILL), a_worker_of("d", Role.DECODE)


def placed(*workers: WorkerRegistration, prompt: int = 10, **demand: object) -> object:
    fleet = Fleet()
    for worker in workers:
        fleet.register(worker)
        fleet.found(worker.worker)
    values = {"model": MODEL, "prompt_tokens": prompt, "answer_tokens": 10} | demand
    return choose(Demand(**values), fleet)  # type: ignore[arg-type]


def test_equal_terms_pair_whatever_the_length() -> None:
    pair = Assignment(
        mode=Mode.REMOTE,
        prefill=P.worker,
        decode=D.worker,
        link=LINK,
        path=KvPath.DIS_GPU,
        path_reason="a seat is free",
    )
    assert placed(P, D) == pair
    assert placed(P, D, prompt=900_000) == pair


def test_layouts_may_differ_since_the_engines_bring_them_together() -> None:
    other = msgspec.structs.replace(NO_SLOTS, block_tokens=16, dtype="fp8")
    assert links_between(P, a_worker_of("d", Role.DECODE, layout=other)) == [LINK]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine_version": "0.33.0"}, "hand_off.engine_version ('0.32.0', '0.33.0')"),
        ({"kind": "sglang_pd"}, "hand_off.kind ('vllm_nixl', 'sglang_pd')"),
        ({"orphan_ms": 5}, "hand_off.orphan_ms (0, 5)"),
        (None, "hand_off (by vllm_nixl, over KV links)"),
    ],
)
def test_others_never_do_and_the_reason_is_told(
    changes: dict[str, object] | None, told: str
) -> None:
    terms = None if changes is None else msgspec.structs.replace(TERMS, **changes)
    other = a_worker_of("d", Role.DECODE, terms)
    assert placed(P, other) == Assignment(
        mode=Mode.LOCAL,
        decode=other.worker,
        path=KvPath.COLOCATED,
        path_reason="no pair can hand its KV over",
    )
    forced = placed(P, other, forced=Forced(mode=Mode.REMOTE))
    assert isinstance(forced, Unplaced)
    assert told in forced.reason


def test_equal_terms_of_other_weights_do_not_pair() -> None:
    other = a_worker_of(
        "d", Role.DECODE, fingerprint=Fingerprint(base="toy-base", weights="vllm:m:fp8")
    )
    assert links_between(P, other) == []


def test_workers_of_other_terms_are_strangers() -> None:
    fleet = Fleet()
    fleet.register(P)
    stranger = a_worker_of("d1", Role.DECODE, msgspec.structs.replace(TERMS, engine_version="2"))
    assert strangers(D, fleet) == {}
    assert strangers(stranger, fleet) == {P.worker: ["hand_off.engine_version ('2', '0.32.0')"]}
