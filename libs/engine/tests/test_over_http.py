"""What HTTP adapters share: events, errors, numbers, contracts."""

from collections.abc import AsyncIterator, Iterable

import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_engine.over_http import events
from diptych_engine.over_http.contract import OBJECT, OBJECTS, Field, faults, shaped, version_key
from diptych_engine.over_http.events import event_data
from diptych_engine.over_http.exposition import labels, totals
from diptych_engine.over_http.liveness import Liveness
from diptych_engine.over_http.refusals import refusal
from diptych_engine.over_http.salts import REMEMBERED, Salts


async def _chunks(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _events(*parts: bytes) -> list[bytes]:
    return [data async for data in event_data(_chunks(parts))]


async def test_events_come_whole_however_they_are_cut() -> None:
    text = b': hello\r\ndata: {"a":1}\r\n\r\ndata:{"b":\ndata: 2}\n\nevent: x\ndata: 3\n\n'
    text += b"data: [DONE]\n\ndata: 4\n\n"
    whole = [b'{"a":1}', b'{"b":\n2}', b"3"]
    assert await _events(text) == whole
    assert await _events(*(text[n : n + 1] for n in range(len(text)))) == whole


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'{"error":{"message":"it broke","code":500}}', EngineGone),
        (b'{"error":{"message":"too long","code":400}}', Permanent),
        (b'{"error":{"message":"full","code":503}}', Refused),
        (b'{"error":"it broke"}', EngineGone),
        (b'{"object":"error","message":"no","code":400,"error":null}', Permanent),
        (b'"error" without a form', EngineGone),
    ],
)
async def test_an_error_in_any_event_is_one(event: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        await _events(b"data: {}\n\n", b"data: " + event + b"\n\n", b"data: [DONE]\n\n")


async def test_a_text_about_errors_is_none() -> None:
    event = b'{"text":"\\"error\\"", "error": null}'
    assert await _events(b"data: " + event + b"\n\n") == [event]


async def test_an_endless_event_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EngineGone, match="more than 100 bytes"):
        await _events(b"data: " + b"x" * 200)


def test_refusals_name_status_and_text() -> None:
    assert "400: too long" in str(refusal(400, b'{"error":{"message":"too long"}}'))
    assert "502: <html>" in str(refusal(502, b"<html>"))
    assert "422" in str(refusal(422, b'{"detail":[{"loc":["body"]}]}'))
    assert isinstance(refusal(500, b"[]"), EngineGone)


PAGE = """# HELP vllm:x y
vllm:x_total{engine="0",note="a } b"} 1.5
vllm:x_total{engine="1"} 2 1700000000
vllm:y 7
vllm:broken{
vllm:cache_config_info{block_size="16",name="a\\"b"} 1.0
other:z 1
"""


def test_numbers_are_summed_over_labels() -> None:
    found = totals(PAGE, "vllm:")
    assert found["vllm:x"] == 3.5
    assert found["vllm:y"] == 7
    assert "other:z" not in found
    assert labels(PAGE, "vllm:cache_config_info")["block_size"] == "16"
    assert labels(PAGE, "vllm:nothing") == {}


def test_a_contract_finds_what_is_unknown_missing_or_wrong() -> None:
    fields = {
        "a": Field(int, required=True),
        "b": Field(OBJECT),
        "b.c": Field(str, required=True),
        "d": Field(OBJECTS),
        "d[].e": Field(list[int], required=True),
    }
    assert list(faults(fields, {"a": 1, "b": {"c": "x"}, "d": [{"e": [1]}]})) == []
    wrong = list(faults(fields, {"a": "1", "b": {"f": 1}, "d": [{}, 3], "g": 1}))
    assert [fault.split(":")[0] for fault in wrong] == [
        "a",
        "unknown field b.f",
        "missing field b.c",
        "missing field d[].e",
        "d",
        "unknown field g",
    ]
    assert list(faults(fields, {})) == ["missing field a"]
    assert list(faults(fields, {"a": 1, "d": 3})) == ["d: expected a list"]
    assert shaped(fields, {"a": 1, "b": {"c": "x", "y": 1}, "d": [{"e": [], "z": 1}], "q": 1}) == {
        "a": 1,
        "b": {"c": "x"},
        "d": [{"e": []}],
    }


def test_versions_compare_by_their_numbers() -> None:
    assert version_key("0.9.1") < version_key("0.11.0rc2") < version_key("0.32.0+cpu")
    assert version_key("v1.2") == (1, 2)
    assert version_key("dev") == ()


def test_salts_are_apart_and_bounded() -> None:
    salts = Salts()
    first = salts.salt("t0")
    assert salts.salt("t0") == first != salts.salt("t1")
    assert salts.tenant(first) == "t0"
    for n in range(REMEMBERED):
        salts.salt(f"x{n}")
    assert salts.tenant(first) is None


async def test_liveness_judges_by_what_comes() -> None:
    now = 0.0
    proofs = 0

    async def alive() -> None:
        return None

    async def proof() -> None:
        nonlocal proofs
        proofs += 1
        if proofs > 1:
            raise Refused("no_room", "full")

    live = Liveness(silence_s=10, probe_s=5, clock=lambda: now)
    await live.check(alive=alive, proof=proof)
    await live.check(alive=alive, proof=proof)
    assert proofs == 1
    with live.asking():
        now = 9.0
        await live.check(alive=alive, proof=proof)
        now = 11.0
        with pytest.raises(EngineGone, match="nothing came for 11 s"):
            await live.check(alive=alive, proof=proof)
        live.heard()
        await live.check(alive=alive, proof=proof)
    now = 20.0
    with pytest.raises(EngineGone, match="no token for a probe"):
        await live.check(alive=alive, proof=proof)
