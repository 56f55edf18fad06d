"""Engines that answer what no engine should, and settings that no engine can have.

Whatever is said fails one request, or the start, with one line: an exception of another kind ends
the worker and all that runs on it.
"""

import asyncio
import contextlib
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import (
    DiptychError,
    EngineGone,
    Incompatible,
    Permanent,
    Refused,
)
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_contracts.sampling import Sampling
from diptych_engine.adapters import AdapterSettings
from diptych_engine.over_http import events as sse
from diptych_engine.over_http.addresses import bracketed, http_url, key_header
from diptych_engine.over_http.client import EngineHttp
from diptych_engine.over_http.events import event_data, events_of
from diptych_engine.over_http.exposition import totals
from diptych_engine.over_http.liveness import until_ready
from diptych_engine.over_http.reading import from_json
from diptych_engine.over_http.refusals import KeyRefused, refusal
from diptych_engine.over_http.salts import Salts
from diptych_engine.port import Phase
from diptych_engine.request_port import EngineStats, TokenDelta
from diptych_engine.request_watch import Watch, WatchTimes
from diptych_engine.sequence import LiveSequence
from diptych_engine.sglang.asking import rid
from diptych_engine.sglang.engine import KEPT_TOKENS, SglangEngine
from diptych_engine.sglang.engine import make as make_sglang
from diptych_engine.sglang.options import SglangOptions
from diptych_engine.sglang.rooms import from_opaque
from diptych_engine.tensorrt_llm.asking import sampling_fields
from diptych_engine.tensorrt_llm.handing_over import Envelope, made
from diptych_engine.tensorrt_llm.kv_events import KvEventReader
from diptych_engine.tensorrt_llm.options import LlmOptions, ServeOptions
from diptych_engine.tensorrt_llm.request_ids import RequestIds
from diptych_engine.tensorrt_llm.serve_cursor import PartCursor
from diptych_engine.tensorrt_llm.serve_wire import read
from diptych_engine.triton.metrics import fetch, read_page
from diptych_engine.triton.settings import ADDRESS, TritonOptions, grpc_target
from diptych_engine.vllm.answers import delta, read_answer
from diptych_engine.vllm.engine import VllmEngine
from diptych_engine.vllm.engine import make as make_vllm
from diptych_engine.vllm.kv_events import BlockChains
from diptych_engine.vllm.options import VllmOptions
from diptych_testkit.fake_engines.vllm import FakeVllm, VllmHabits
from diptych_testkit.fake_engines.works import a_work, adapter_settings, handed_over

DEEP = b"[" * 100_000


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


# What an engine says.


async def test_nesting_without_end_is_an_engines_fault_not_ours() -> None:
    with pytest.raises(EngineGone):
        _ = [e async for e in event_data(_chunks(b'data: {"error":' + DEEP + b"\n\n"))]
    with pytest.raises(EngineGone, match="nested too deeply"):
        read_answer(b'{"choices":[],"x":' + DEEP)
    assert isinstance(refusal(500, DEEP), EngineGone)
    with pytest.raises(Incompatible):
        from_opaque(b'{"x":' + DEEP)
    with pytest.raises(Refused):
        read(b'{"x":' + DEEP)
    assert from_json(b'{"a":[1]}') == {"a": [1]}


async def test_an_event_of_endless_lines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line alone is short; memory would fill all the same."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EngineGone, match="more than 100 bytes"):
        _ = [e async for e in event_data(_chunks(*[b"data: xxxxxxxxxx\n"] * 20))]


async def test_a_line_ends_with_a_line_feed_only() -> None:
    """U+2028, U+0085 and form feeds stand unescaped in the JSON of some servers."""
    text = '{"text":"a\u2028b\x85c\x0cd\u2029"}'.encode()
    whole = b"data: " + text + b"\n\ndata: [DONE]\n\n"
    for cut in (1, 7, len(whole)):
        parts = [whole[at : at + cut] for at in range(0, len(whole), cut)]
        assert [e async for e in events_of(_chunks(*parts))] == [text]


def test_numbers_that_are_none_are_left_out() -> None:
    page = 'sglang:a NaN\nsglang:b +Inf\nsglang:c 3\nsglang:c{x="1"} nan\n'
    assert totals(page, "sglang:") == {"sglang:c": 3.0}
    line = 'nv_trt_llm_request_metrics{model="m",request_type="%s"} %s\n'
    text = line % ("waiting", "NaN") + line % ("scheduled", "2") + line % ("max", "x")
    assert read_page(text, "m").stats == EngineStats(running=2)


def test_a_key_that_is_not_taken_is_no_reason_to_wait() -> None:
    assert isinstance(refusal(401, b"{}"), KeyRefused)

    async def ask() -> None:
        raise refusal(401, b'{"error":"Unauthorized"}')

    with pytest.raises(Permanent, match=r"401: Unauthorized.*api_key"):
        asyncio.run(until_ready(ask, within_s=3600))


@pytest.mark.parametrize("error", [Refused("no_room", "full"), Permanent("UNIMPLEMENTED")])
async def test_a_probe_that_is_refused_is_a_miss(error: DiptychError) -> None:
    """It ended the worker: only `EngineGone` was expected of a probe."""
    gone: asyncio.Future[EngineGone] = asyncio.get_running_loop().create_future()

    async def health() -> None:
        raise error

    watch = Watch(
        SimpleNamespace(health=health),  # type: ignore[arg-type]
        WatchTimes(health_s=0.001),
        on_gone=gone.set_result,
        on_kv=lambda _: None,
    )
    probing = asyncio.create_task(watch.health())
    async with asyncio.timeout(60):
        done, _ = await asyncio.wait({probing, gone}, return_when=asyncio.FIRST_COMPLETED)
    probing.cancel()
    assert gone in done
    assert str(error) in str(await gone)


# Settings.


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "10.0.0.1", "ftp://h", "http://", "http://[::1", "http://::1:8998"),
        *("http://h:99999", "http://h:0", "http://h:1\n", "http://h:x", "http://h/?key=1"),
        *("http://user:secret@h:1", "http://h h:1", "http://höst:1"),
    ],
)
def test_a_url_that_is_none_is_told_at_once(url: str) -> None:
    for make in (make_vllm, make_sglang):
        with pytest.raises(Permanent, match="engine_url: expected http://host:port") as told:
            make(adapter_settings("x", url))
        assert "secret" not in str(told.value)
        assert "\n" not in str(told.value)


def test_urls_that_can_be_are_taken() -> None:
    for url in ("http://h", "https://h:1", "http://[::1]:8000", "http://h:1/behind/a/path"):
        assert http_url(url + "/", "x") == url
    assert (bracketed("::1"), bracketed("h")) == ("[::1]", "h")


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-sécret", "sk secret"])
def test_a_key_that_no_header_takes_is_not_told(key: str) -> None:
    with pytest.raises(Permanent, match="api_key: expected printable ASCII") as told:
        EngineHttp("http://h:1", api_key=key)
    assert key.strip() not in str(told.value)
    assert key_header("sk-1") == {"Authorization": "Bearer sk-1"}


@pytest.mark.parametrize("kind", [VllmOptions, SglangOptions, TritonOptions, ServeOptions])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_named(kind: type[Any], value: float) -> None:
    names = [name for name in kind.__struct_fields__ if name.endswith("_s")]
    assert names
    for name in names:
        with pytest.raises(Permanent, match=name):
            settings_with({name: value}).options_as(kind)


@pytest.mark.parametrize(
    "option",
    [{"tensor_parallel": 0}, {"kv_memory_frac": 90}, {"event_buffer": -1}, {"start_s": -1}],
)
def test_a_number_that_no_engine_takes_is_named(option: dict[str, float]) -> None:
    with pytest.raises(Permanent, match=next(iter(option))):
        settings_with(option).options_as(LlmOptions)


def settings_with(options: Mapping[str, Any]) -> AdapterSettings:
    return adapter_settings("x", "http://h:1", options=options)


def test_a_machine_that_is_none_is_said_in_one_line() -> None:
    with pytest.raises(Permanent, match="machine_id: expected 0 to 1023, got 1024"):
        RequestIds(process_ids=False, machine=1024)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "localhost:5557", "tcp://h", "x\0y"])
def test_where_nobody_can_listen_is_told_at_once(endpoint: str) -> None:
    for name in ("kv_events", "kv_replay"):
        with pytest.raises(Permanent, match=f"{name}.*expected tcp://host:port"):
            make_vllm(settings_with({name: endpoint}))
    make_vllm(settings_with({"kv_events": "tcp://127.0.0.1:5557"}))


def test_tritons_http_side_is_no_grpc_side() -> None:
    for url in ("http://h:8000", "https://h", "h:8001/v2", "u:p@h:1"):
        with pytest.raises(Permanent, match="gRPC side"):
            grpc_target(url)
    assert [grpc_target(u) for u in ("", "grpc://h:1", "h:1")] == [ADDRESS, "h:1", "h:1"]


def test_tritons_certificates_can_be_named() -> None:
    """They were of a type that no TOML file has."""
    assert settings_with({"tls_roots": "/ca.pem"}).options_as(TritonOptions).tls_roots == "/ca.pem"


@contextlib.contextmanager
def answering(text: bytes) -> Iterator[str]:
    """A server that says `text` to whoever comes, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(text)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


def test_a_page_that_is_no_http_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(b"SSH-2.0-OpenSSH\r\n\r\n") as url, pytest.raises(OSError):  # noqa: PT011
        fetch(url, 60.0)
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab") as url:
        assert fetch(url, 60.0) == "ab"


class Pages:
    """Answers of a server, by path."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self._pages = pages
        self.url = "http://h:1"

    async def get(self, path: str, *, within_s: float) -> bytes:
        return self._pages[path]


# Triton.


def test_an_engine_that_counts_otherwise_may_end_its_answer() -> None:
    """Of its text we make fewer tokens than it sampled: such an answer was given up as broken."""
    spec = settings_with({}).spec(block_tokens=16, dtype="x")
    for recounted in (True, False):
        sequence = LiveSequence.begin(a_work(max_tokens=8), spec, no_stops)
        end = TokenDelta((5, 6), EndReason.LENGTH, recounted=recounted)
        if recounted:
            assert sequence.take(end).finish is EndReason.LENGTH
        else:
            with pytest.raises(Refused, match="6 tokens too early"):
                sequence.take(end)


def no_stops(_: object) -> Any:
    raise AssertionError("there are no stop strings")


# vLLM.


@pytest.mark.parametrize("models", [b"<html>", b"{}", b'{"data":[]}', DEEP])
async def test_a_server_that_is_no_vllm_is_told_in_one_line(models: bytes) -> None:
    engine = VllmEngine(adapter_settings("vllm", "http://h:1"), VllmOptions(start_s=0))
    pages = Pages({"/version": b'{"version":"0.32.0"}', "/v1/models": models})
    engine._http = pages  # type: ignore[assignment]
    with pytest.raises(Permanent, match="http://h:1"):
        await engine.start()


@pytest.mark.parametrize(
    "opaque", [b"{", b"[1]", b'null,"model":"other"', b"{}{}", b'{"a":' + DEEP]
)
async def test_a_hand_off_is_no_way_into_a_request(opaque: bytes) -> None:
    """It stands in the request as it came: what is no object would become part of the rest."""
    engine = VllmEngine(adapter_settings("vllm", "http://h:1"), VllmOptions())
    offer = EngineHandOff(terms=_terms(engine), opaque=opaque)
    with pytest.raises(Incompatible, match="no transfer params"):
        await anext(engine.generate(a_work(Phase.DECODE, hand_off=offer)))


def _terms(engine: VllmEngine) -> Any:
    engine._describe("0.32.0", SimpleNamespace(id="m", root="", max_model_len=None), "")  # type: ignore[arg-type]
    assert engine.spec.hand_off is not None
    return engine.spec.hand_off


async def test_what_an_answer_says_of_its_kv_is_heard() -> None:
    """It stands behind the end, where whoever reads an answer has left already."""
    prefill = FakeVllm(habits=VllmHabits(forgets=("remote_port",)))
    decode = FakeVllm(prefill.nixl)
    for server in (prefill, decode):
        server.start()
    options = VllmOptions(start_s=60.0)
    engines = [VllmEngine(adapter_settings("vllm", s.url), options) for s in (prefill, decode)]
    try:
        for engine in engines:
            await engine.start()
        offer = await handed_over(engines[0], a_work(Phase.PREFILL))
        async with aclosing(engines[1].generate(a_work(Phase.DECODE, hand_off=offer))) as stream:
            async for found in stream:
                if found.finish is not None:
                    break
        assert engines[1].counts.recomputed == 1
    finally:
        for engine in engines:
            await engine.close()
        for server in (prefill, decode):
            server.stop()
    assert prefill.faults + decode.faults == []


@pytest.mark.parametrize("top", [0, 1, 2])
def test_as_many_likely_tokens_are_told_as_were_asked_for(top: int) -> None:
    """vLLM tells the chosen one on top of them, as OpenAI's old interface did."""
    likely = {"token_id:8": -0.5, "token_id:9": -0.6, "token_id:7": -3.0}
    logprobs = {"tokens": ["token_id:7"], "token_logprobs": [-3.0], "top_logprobs": [likely]}
    choice = {"token_ids": [7], "finish_reason": None, "logprobs": logprobs}
    answer = read_answer(msgspec.json.encode({"choices": [choice]}))
    found = delta(answer, (), ignore_eos=True, top=top)
    assert found is not None
    assert found.logprobs == (((7, -3.0), *((8, -0.5), (9, -0.6))[:top]),)


def test_a_token_of_another_name_is_no_crash() -> None:
    logprobs = {"tokens": ["token_id:x"], "token_logprobs": [0], "top_logprobs": [None]}
    choice = {"token_ids": [7], "logprobs": logprobs}
    answer = read_answer(msgspec.json.encode({"choices": [choice]}))
    with pytest.raises(EngineGone, match="token_id:x"):
        delta(answer, (), ignore_eos=True, top=0)


def test_a_long_prompts_blocks_share_what_lies_before_them() -> None:
    """Each had a copy of all before it: 8192 blocks of 16 tokens took 4 GB."""
    n_blocks, size = 1024, 16
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(1, n_blocks + 1)),
        "parent_block_hash": None,
        "token_ids": list(range(n_blocks * size)),
        "block_size": size,
    }
    batch = msgspec.msgpack.encode([0.0, [event]])
    chains = BlockChains(Salts())
    tracemalloc.start()
    try:
        (stored,) = chains.events(batch)
        kept_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert stored.token_ids == tuple(range(n_blocks * size))  # type: ignore[union-attr]
    assert kept_bytes < 16 << 20
    tail = {"type": "BlockStored", "block_hashes": [5000], "parent_block_hash": 2}
    tail |= {"token_ids": [7] * size, "block_size": size}
    (more,) = chains.events(msgspec.msgpack.encode([0.0, [tail]]))
    assert more.engine_hashes == (1, 2, 5000)  # type: ignore[union-attr]
    assert more.token_ids == (*range(2 * size), *[7] * size)  # type: ignore[union-attr]


@pytest.mark.parametrize("event", [{"type": "BlockStored"}, 7, {"type": "BlockRemoved", "x": 1}])
def test_events_of_another_form_empty_the_index_and_no_more(event: Any) -> None:
    with pytest.raises(EngineGone, match="KV events"):
        list(BlockChains(Salts()).events(msgspec.msgpack.encode([0.0, [event]])))


# SGLang.


def test_no_attempts_name_begins_anothers() -> None:
    """SGLang aborts whatever begins with the name it is given."""
    names = []
    for attempt in (1, 10, 11, 100):
        work = a_work()
        key = work.key._replace(attempt=attempt)
        names.append(rid(replace(work, key=key)))
    for one in names:
        assert [name for name in names if name.startswith(one)] == [one]


def _sglang(info: Mapping[str, Any], role: Role = Role.DECODE) -> SglangEngine:
    told = {"version": "0.5.23", "model_path": "/m", "disaggregation_mode": "null"} | dict(info)
    engine = SglangEngine(
        adapter_settings("sglang", "http://h:1", role=role), SglangOptions(start_s=0)
    )
    pages = Pages({"/get_server_info": msgspec.json.encode(told)})
    engine._http = pages  # type: ignore[assignment]
    return engine


async def test_sglang_does_not_use_all_of_its_context() -> None:
    """It refuses a prompt of context - 6, and ends an answer two tokens before the context."""
    for info in ({"context_length": 1000}, {"max_total_num_tokens": 1000}):
        engine = _sglang(info)
        await engine.start()
        assert engine.spec.context_tokens == 1000 - KEPT_TOKENS


@pytest.mark.parametrize(("mode", "role"), [("prefill", Role.PREFILL), ("decode", Role.DECODE)])
async def test_a_backend_that_moves_nothing_is_told_at_the_start(mode: str, role: Role) -> None:
    info = {"disaggregation_mode": mode, "disaggregation_transfer_backend": "fake"}
    with pytest.raises(Permanent, match="`fake` moves no KV"):
        await _sglang(info, role).start()


async def test_a_whole_server_need_not_move_anything() -> None:
    engine = _sglang({"context_length": 1000, "disaggregation_transfer_backend": "fake"})
    await engine.start()
    assert engine._phases == {Phase.GENERATE}


@pytest.mark.parametrize(
    ("mode", "role"),
    [("prefill", Role.DECODE), ("decode", Role.PREFILL), ("encode", Role.PREFILL)],
)
async def test_a_server_of_another_role_is_told_at_the_start(mode: str, role: Role) -> None:
    with pytest.raises(Permanent, match=f"--disaggregation-mode: expected .*{mode}"):
        await _sglang({"disaggregation_mode": mode}, role).start()


# TensorRT-LLM.


def test_the_rest_of_an_answer_has_random_numbers_of_its_own() -> None:
    """The engine begins them anew with each request, and would repeat itself."""
    warm = Sampling(temperature=1.0, seed=7)

    def seed(n_answer: int, *, handed: bool = False) -> int:
        offer: Any = object() if handed else None
        work = a_work(sampling=warm, answer_ids=(5,) * n_answer, hand_off=offer)
        found: int = sampling_fields(work, (1,))["seed"]
        return found

    assert seed(0) == 7
    assert seed(1, handed=True) == 7  # both legs are of one answer
    assert len({seed(0), seed(1), seed(2)}) == 3
    assert all(0 <= seed(n) < 1 << 63 for n in range(20))


def test_a_description_of_another_form_is_no_crash() -> None:
    def strict(**fields: Any) -> Any:
        raise ValueError(f"no such type: {fields}")

    package: Any = SimpleNamespace(DisaggregatedParams=strict, Logprob=strict)
    for fields in ({"a": 1}, {"first_gen_log_probs": [{"__logprobs__": 5}]}):
        envelope = Envelope(engine_version="1", prompt_tokens=1, fields=fields)
        with pytest.raises(Incompatible, match="cannot be made again"):
            made(envelope, package)


def test_a_part_that_counts_too_few_tokens_is_no_crash() -> None:
    part = read(b'{"choices":[{"token_ids":[5]}],"usage":{"completion_tokens":0}}')
    offer: Any = object()
    cursor = PartCursor(a_work(Phase.DECODE, answer_ids=(5,), hand_off=offer), ())
    with pytest.raises(Refused, match="counts 0 tokens and gives 1"):
        cursor.take(part)


@pytest.mark.parametrize(
    "event",
    [
        7,
        {"data": 7},
        {"data": {"type": "stored", "blocks": [{"block_hash": 1, "tokens": [{"x": 1}]}]}},
        {"data": {"type": "stored", "blocks": [7]}},
    ],
)
def test_cache_events_of_another_form_are_no_crash(event: Any) -> None:
    with pytest.raises(EngineGone, match="KV events"):
        KvEventReader(1).read(event)
