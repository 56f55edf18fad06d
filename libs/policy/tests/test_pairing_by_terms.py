"""Workers whose engines move KV themselves pair if model, weights and terms are equal."""

import msgspec
import pytest

from diptych_contracts.cards import Fingerprint
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.handoffs import LINK, FirstToken, HandOffTerms
from diptych_contracts.requests import Assignment, Forced, Mode
from diptych_policy.fleet import Fleet
from diptych_policy.routing import Demand, Unplaced, choose, links_between, lonely
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
    pair = Assignment(mode=Mode.REMOTE, prefill=P.worker, decode=D.worker, link=LINK)
    assert placed(P, D) == pair
    assert placed(P, D, prompt=900_000) == pair


def test_layouts_may_differ_since_the_engines_bring_them_together() -> None:
    other = msgspec.structs.replace(NO_SLOTS, block_tokens=16, dtype="fp8")
    assert links_between(P, a_worker_of("d", Role.DECODE, layout=other)) == [LINK]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"engine_version": "0.33.0"}, "vllm_nixl 0.32.0 and vllm_nixl 0.33.0 do not pair"),
        ({"kind": "sglang_pd"}, "vllm_nixl 0.32.0 and sglang_pd 0.32.0 do not pair"),
        ({"orphan_ms": 5}, "do not pair"),
        (None, "vllm_nixl 0.32.0 and KV links do not pair"),
    ],
)
def test_others_never_do_and_the_reason_is_told(
    changes: dict[str, object] | None, told: str
) -> None:
    terms = None if changes is None else msgspec.structs.replace(TERMS, **changes)
    other = a_worker_of("d", Role.DECODE, terms)
    assert placed(P, other) == Assignment(mode=Mode.LOCAL, decode=other.worker)
    forced = placed(P, other, forced=Forced(mode=Mode.REMOTE))
    assert isinstance(forced, Unplaced)
    assert told in forced.reason
    assert "(p, d)" in forced.reason


def test_equal_terms_of_other_weights_do_not_pair() -> None:
    other = a_worker_of(
        "d", Role.DECODE, fingerprint=Fingerprint(base="toy-base", weights="vllm:m:fp8")
    )
    assert links_between(P, other) == []


def test_a_worker_is_lonely_if_it_has_peers_and_none_pairs() -> None:
    fleet = Fleet()
    fleet.register(P)
    assert lonely(P, fleet) == ""
    stranger = a_worker_of("d1", Role.DECODE, msgspec.structs.replace(TERMS, engine_version="2"))
    fleet.register(stranger)
    assert lonely(P, fleet) == "d1: vllm_nixl 0.32.0 and vllm_nixl 2 do not pair"
    assert "do not pair" in lonely(stranger, fleet)
    fleet.register(D)
    assert lonely(P, fleet) == ""
