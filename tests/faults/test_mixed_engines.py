"""Two models on different engines behind one gateway, and an opaque hand-off that no log shows."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import structlog

from diptych_contracts.cards import Fingerprint
from diptych_contracts.errors import Refused
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import (
    MAX_OPAQUE_BYTES,
    EngineHandOff,
    FirstToken,
    HandOffTerms,
)
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import DecodeJob
from diptych_contracts.journal import Report
from diptych_telemetry import metrics, recorded_spans
from diptych_testkit.builders import a_generation
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE, small_gateway
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_testkit.toy_request_engine import ToyRequestEngine, ToySettings, Wire
from diptych_worker.taking_over import check_hand_off

CHAT = "/v1/chat/completions"
SECRET = b"zither"
TERMS = HandOffTerms(kind="toy", engine_version="1", first_token=FirstToken.PREFILL)


class MarkedEngine(ToyRequestEngine):
    """Hands over with a mark in what only engines may read."""

    async def prefill(self, work: Any, offer: Any) -> Any:
        def marked(hand_off: EngineHandOff) -> None:
            opaque = hand_off.opaque + b"/" + SECRET
            offer(msgspec.structs.replace(hand_off, opaque=opaque))

        return await super().prefill(work, marked)

    def _fetch(self, work: Any) -> None:
        assert work.hand_off.opaque.endswith(SECRET)
        opaque = work.hand_off.opaque.removesuffix(b"/" + SECRET)
        plain = msgspec.structs.replace(work.hand_off, opaque=opaque)
        super()._fetch(replace(work, hand_off=plain))


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as events:
        yield events


async def start(fleet: SmallFleet) -> Wire:
    wire = Wire()
    fleet.scheduler()
    other = msgspec.structs.replace(
        tiny_card(model="other"), fingerprint=Fingerprint(base="toy", weights="none")
    )
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        fleet.worker(name, role, engine=ToyStepEngine(vocab_size=VOCAB_SIZE))
        engine = MarkedEngine(ToySettings(vocab_size=VOCAB_SIZE), wire=wire)
        engine.spec = replace(
            engine.spec, unsupported=("logit_bias", "response_format", "tool_choice")
        )
        fleet.worker(f"{name}-other", role, engine=engine, card=other)
    await fleet.ready()
    return wire


def body(model: str, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Say something."}]
    asked = {"temperature": 0, "max_tokens": 12, "diptych": {"mode": "remote"}}
    return {"model": model, "messages": said, **asked, **more}


async def test_each_model_is_served_by_its_own_engine_and_no_secret_is_told(
    logged: list[Any], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with recorded_spans() as spans:
        async with small_fleet() as fleet, small_gateway(fleet, "g1") as gateway:
            await start(fleet)
            answers = {}
            for model in ("toy", "other"):
                answer = await gateway.post(CHAT, body(model))
                assert answer.status_code == 200, answer.text
                answers[model] = answer.json()["choices"][0]["message"]["content"]
            assert answers["toy"] == answers["other"] != ""
            biased = {"logit_bias": {"5": 1}}
            refused = await gateway.post(CHAT, body("other", **biased))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "logit_bias"
            structured = body("other", response_format={"type": "json_object"})
            refused = await gateway.post(CHAT, structured)
            assert refused.json()["error"]["param"] == "response_format"
            assert (await gateway.post(CHAT, body("toy", **biased))).status_code == 200
            told = metrics.render().decode()
        finished = [(s.name, s.attributes, s.events, s.status) for s in spans.get_finished_spans()]
    mark = SECRET.decode()
    for where in (logged, [r.getMessage() for r in caplog.records], finished, told, capfd):
        text = repr(where.readouterr()) if where is capfd else repr(where)  # type: ignore[union-attr]
        assert mark not in text


# What a decode worker takes


def a_job(**changes: Any) -> DecodeJob:
    values = {
        "generation": a_generation(),
        "prefill_worker": Incarnation("p"),
        "transfer_id": transfer_id(RequestId("r1"), 1),
        "first_ids": (5,),
        "blocks": (),
        "report": Report(),
        "hand_off": EngineHandOff(terms=TERMS, opaque=SECRET),
    }
    return DecodeJob(**(values | changes))


def test_a_hand_off_on_equal_terms_is_taken() -> None:
    check_hand_off(TERMS, a_job())
    check_hand_off(None, a_job(hand_off=None))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hand_off": None}, "expected toy 1, got one over a KV link"),
        ({"first_ids": ()}, "first token of prefill, got 0"),
        (
            {"hand_off": EngineHandOff(terms=TERMS, opaque=SECRET * MAX_OPAQUE_BYTES)},
            "at most 1048576 bytes",
        ),
        (
            {
                "hand_off": EngineHandOff(
                    terms=msgspec.structs.replace(TERMS, engine_version="2"), opaque=SECRET
                )
            },
            "expected toy 1, got toy 2",
        ),
    ],
)
def test_any_other_is_refused_without_a_word_of_what_it_holds(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(Refused, match=told) as caught:
        check_hand_off(TERMS, a_job(**changes))
    assert SECRET.decode() not in str(caught.value) + json.dumps(repr(a_job(**changes)))
