"""TensorRT-LLM in this process, through its LLM API.

The engine schedules, and its transceiver moves KV between GPUs; of a hand-off only its description
crosses Diptych. Token ids go in and come out: it has no tokenizer here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_engine.port import EngineSpec, SequenceWork
from diptych_engine.request_port import EngineStats, KvEvent, TokenDelta
from diptych_engine.tensorrt_llm import handing_over
from diptych_engine.tensorrt_llm.asking import (
    check_obeyed,
    left_of,
    sampling_fields,
    tokens_of,
)
from diptych_engine.tensorrt_llm.checking import Importer
from diptych_engine.tensorrt_llm.configuring import llm_keywords
from diptych_engine.tensorrt_llm.cursors import BROKEN, Cursor
from diptych_engine.tensorrt_llm.iteration_stats import stats_of
from diptych_engine.tensorrt_llm.kv_events import KvEventReader
from diptych_engine.tensorrt_llm.options import LlmOptions
from diptych_engine.tensorrt_llm.package import Features, Package, load_package
from diptych_engine.tensorrt_llm.request_ids import RequestIds
from diptych_engine.tensorrt_llm.requests import LiveRequest
from diptych_engine.tensorrt_llm.served import GUIDED, Served

STATS_S = 0.05
"""How long to wait for statistics: those of the last iteration lie ready, or there are none."""
EVENTS_S = 2.0
IDLE_S = 0.2
"""Between two readings of an engine that has nothing to tell."""


class TrtLlmEngine:
    """A `RequestEngine` over `tensorrt_llm.llmapi.LLM`.

    Args:
        served: The model.
        options: What the operator set.
        importer: Where the engine's modules come from; tests have a fake's.
    """

    def __init__(
        self, served: Served, options: LlmOptions, *, importer: Importer = import_module
    ) -> None:
        self._served, self._options = served, options
        self._importer = importer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensorrt_llm")
        self._package: Package | None = None
        self._llm: Any = None
        self._running = 0
        self._answered = asyncio.Event()
        self._drain = asyncio.Lock()
        self._last = EngineStats()
        self._gone: str | None = None
        self.features: Features | None = None
        self.notes: tuple[str, ...] = ()
        """Where the installed engine differs harmlessly from the contract."""
        self.spec = self._spec("")

    def _spec(self, version: str) -> EngineSpec:
        options = self._options
        unsupported = ("logit_bias", "tool_choice", *(() if options.guided else GUIDED))
        spec = self._served.spec(
            f"tensorrt_llm-{version}",
            options,
            moves_as=f"{version}/{options.transceiver}",
            unsupported=unsupported,
        )
        return replace(spec, step_tokens=options.max_num_tokens)

    async def start(self) -> None:
        """Import the engine, hold it against the contract, load the weights.

        Raises:
            Permanent: it is not there, not what the adapter is written for, or refuses its
                settings; one clear line.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._options.start_s):
                await loop.run_in_executor(self._thread, self._load)
        except TimeoutError as err:
            raise Permanent(
                f"TensorRT-LLM did not load {self._served.checkpoint} in {self._options.start_s} s"
            ) from err
        assert self.features is not None
        self._ids = RequestIds(
            process_ids=self.features.process_ids, machine=self._options.machine_id
        )
        self.spec = self._spec(self.features.version)

    def _load(self) -> None:
        package, self.features, problems = load_package(self._importer)
        self.notes = tuple(map(str, problems))
        served, options = self._served, self._options
        try:
            keywords = llm_keywords(
                package,
                options,
                role=served.role,
                context_tokens=served.context_tokens,
                max_sequences=served.max_sequences,
                kv_tokens=served.kv_tokens,
            )
            self._llm = package.LLM(model=served.checkpoint, **keywords)
        except DiptychError:
            raise
        except Exception as err:  # of another maker: what a wrong setting raises is not told
            raise Permanent(f"TensorRT-LLM does not start: {_first_line(err)}") from err
        self._package = package

    async def prefill(
        self, work: SequenceWork, offer: Callable[[EngineHandOff], None]
    ) -> TokenDelta:
        """Compute the prompt and offer its KV; see `request_port.RequestEngine`."""
        package = self._ready()
        if left_of(work) <= 1:  # nothing would fetch the KV of a hand-off
            return (await self._whole(work, None))[1]
        params = package.DisaggregatedParams(request_type="context_only", **self._id_field())
        output, delta = await self._whole(work, params)
        if delta.finish is EndReason.STOP:
            return delta
        offer(self._hand_off(work, params, output))
        return delta._replace(finish=None)  # the engine ends each context leg after one token

    async def _whole(self, work: SequenceWork, params: Any) -> tuple[Any, TokenDelta]:
        request = self._ask(work, params, streaming=False)
        try:
            output = await request.whole()
        except Exception as err:
            raise self._told(err) from err
        finally:
            self._running -= 1
        self._answered.set()
        delta = Cursor(work, self.spec.eos_ids).take(output, cached=request.cached_tokens)
        return output, delta

    def _id_field(self) -> dict[str, int]:
        if self.features is None or not self.features.disagg_request_id:
            return {}
        return {"disagg_request_id": self._ids.next()}

    def _hand_off(self, work: SequenceWork, asked: Any, output: Any) -> EngineHandOff:
        given = output.disaggregated_params
        if given is None or not given.opaque_state or not given.first_gen_tokens:
            raise Refused(BROKEN, "the engine computed the prompt and gave no hand-off")
        fields = handing_over.fields_set(given)
        if "disagg_request_id" not in fields and (asked_id := self._id_of(asked)) is not None:
            fields["disagg_request_id"] = asked_id
        opaque = handing_over.sealed(
            fields, version=self._ready().version, prompt_tokens=len(tokens_of(work))
        )
        assert self.spec.hand_off is not None
        return EngineHandOff(terms=self.spec.hand_off, opaque=opaque)

    def _id_of(self, params: Any) -> int | None:
        if self.features is None or not self.features.disagg_request_id:
            return None
        found: int | None = params.disagg_request_id
        return found

    async def generate(self, work: SequenceWork) -> AsyncGenerator[TokenDelta, None]:
        """Tokens as they come; see `request_port.RequestEngine`."""
        self._ready()
        params = None if work.hand_off is None else self._taken(work, work.hand_off)
        request = self._ask(work, params, streaming=True)
        drafts = self._options.speculative is not None
        cursor = Cursor(work, self.spec.eos_ids, drafts=drafts)
        steps = request.steps()
        try:
            async for output in steps:
                self._answered.set()
                delta = cursor.take(output, cached=request.cached_tokens)
                if delta.token_ids or delta.finish is not None:
                    yield delta
                if delta.finish is not None:
                    return
        except DiptychError:
            raise
        except Exception as err:
            raise self._told(err) from err
        finally:
            await steps.aclose()
            self._running -= 1

    def _taken(self, work: SequenceWork, hand_off: EngineHandOff) -> Any:
        package = self._ready()
        assert self.features is not None
        envelope = handing_over.opened(
            hand_off,
            version=package.version,
            prompt_tokens=len(tokens_of(work)),
            known=frozenset(self.features.hand_off_fields),
        )
        return handing_over.made(envelope, package, request_type="generation_only")

    def _ask(self, work: SequenceWork, params: Any, *, streaming: bool) -> LiveRequest:
        """Give the engine a request. What it says against it at once is the request's fault."""
        package, options = self._ready(), self._options
        check_obeyed(work, guided=options.guided is not None)
        fields = sampling_fields(work, self.spec.eos_ids)
        if work.sampling.grammar is not None:
            fields["guided_decoding"] = package.GuidedDecodingParams(
                json=work.sampling.grammar.text
            )
        keywords: dict[str, Any] = {"cache_salt": work.tenant} if work.tenant else {}
        if params is not None:
            keywords["disaggregated_params"] = params
        try:
            result = self._llm.generate_async(
                tokens_of(work),
                sampling_params=package.SamplingParams(**fields),
                streaming=streaming,
                **keywords,
            )
        except (ValueError, TypeError) as err:
            raise Permanent(f"TensorRT-LLM refuses the request: {_first_line(err)}") from err
        except Exception as err:
            raise self._told(err) from err
        self._running += 1
        return LiveRequest(
            result,
            fetching=work.hand_off is not None,
            abort_s=options.abort_s,
            fetch_s=options.kv_transfer_timeout_ms / 1000 + options.abort_s,
            on_failure=self._told,
        )

    async def stats(self) -> EngineStats:
        """How full the engine was in its last iteration. None before its first answer."""
        self._ready()
        if not self._answered.is_set():
            return EngineStats(running=self._running, waiting=0)
        async with self._drain:
            try:
                async with asyncio.timeout(1.0):
                    async for told in self._llm.get_stats_async(timeout=STATS_S):
                        self._last = stats_of(told)
            except TimeoutError:
                pass
            except Exception as err:
                raise self._told(err) from err
        return self._last

    async def kv_events(self) -> AsyncIterator[KvEvent]:
        """What the engine keeps. One reader at a time: reading takes events away."""
        self._ready()
        if not (self._options.block_reuse and self._options.event_buffer):
            return
        reader = KvEventReader(self._options.tokens_per_block)
        await self._answered.wait()  # before its first answer the engine's call blocks
        while True:
            seen = 0
            try:
                async for event in self._llm.get_kv_cache_events_async(timeout=EVENTS_S):
                    seen += 1
                    for news in reader.read(event):
                        yield news
            except DiptychError:  # an event that cannot be read: the engine itself lives
                raise
            except Exception as err:
                raise self._told(err) from err
            if not seen:
                await asyncio.sleep(IDLE_S)

    async def health(self) -> None:
        """Ask the engine's own check, and an idle engine for one token. Raises `EngineGone`."""
        package = self._ready()
        assert self.features is not None
        try:
            if self.features.health_check and not self._llm._check_health():
                raise EngineGone("TensorRT-LLM says that it is not healthy")
            if self._running:
                return
            fields = {"end_id": -1, "pad_id": 0, "max_tokens": 1, "top_k": 1, "detokenize": False}
            params = package.SamplingParams(**fields)
            async with asyncio.timeout(self._options.probe_s):
                await self._llm.generate_async([1], sampling_params=params).aresult()
            self._answered.set()
        except TimeoutError as err:
            self._gone = f"TensorRT-LLM gives no token in {self._options.probe_s} s"
            raise EngineGone(self._gone) from err
        except Exception as err:
            raise self._told(err) from err

    async def close(self) -> None:
        """Shut the engine down."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, llm.shutdown)
        self._thread.shutdown(wait=False)

    def _ready(self) -> Package:
        if self._gone is not None:
            raise EngineGone(self._gone)
        if self._package is None or self._llm is None:
            raise EngineGone("TensorRT-LLM is not running")
        return self._package

    def _told(self, err: Exception) -> Exception:
        """`err` in our words. What is no request's own failure means that the engine is dead."""
        if isinstance(err, EngineGone):
            self._gone = str(err)
        if isinstance(err, DiptychError):
            return err
        if self._package is not None and isinstance(err, self._package.RequestError):
            return Refused(BROKEN, f"TensorRT-LLM gave a request up: {_first_line(err)}")
        self._gone = f"TensorRT-LLM died: {type(err).__name__}: {_first_line(err)}"
        return EngineGone(self._gone)


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]
