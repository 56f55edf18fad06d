"""vLLM that is not there, as `engines.md` section 5 describes 0.32.0."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from diptych_engine.over_http.contract import Contract
from diptych_engine.vllm.contract import CONTRACT
from diptych_testkit.fake_engines.habits import Habits, TokenServer
from diptych_testkit.fake_engines.strict_server import Exchange
from diptych_testkit.fake_engines.toy_tokens import toy_logprob

BLOCK_TOKENS = 16
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_ERROR = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}
_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(kw_only=True)
class VllmHabits(Habits):
    """How it behaves."""

    version: str = "0.32.0"
    model: str = "toy"
    root: str = "/models/toy"
    context_tokens: int = 4096
    token_level: bool = False
    lease_s: float = 30.0
    details: bool = True
    """Whether usage tells of cached tokens."""
    forgets: tuple[str, ...] = ()
    """Fields that its transfer params lack."""
    null_params: bool = False
    healthy: bool = True


@dataclass
class FakeNixl:
    """KV that a fake prefill keeps for a fake decode."""

    kept: dict[str, tuple[dict[str, Any], list[int], float, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pinned(self) -> int:
        """Hand-offs whose KV is kept and whose lease runs."""
        with self.lock:
            return sum(until > time.monotonic() for _, _, until, _ in self.kept.values())


class FakeVllm(TokenServer):
    """One server.

    Args:
        nixl: Shared by those that hand over.
        habits: How it behaves; may change while it runs.
        contract: What it takes and gives.
    """

    def __init__(
        self,
        nixl: FakeNixl | None = None,
        habits: VllmHabits | None = None,
        contract: Contract = CONTRACT,
    ) -> None:
        handlers = {
            "version": self._version,
            "health": self._health,
            "metrics": self._metrics,
            "models": self._models,
            "completions": self._completions,
            "generate": self._generate,
        }
        self.habits = habits or VllmHabits()
        super().__init__(contract, handlers, self.habits, _ERROR)
        self.nixl = nixl or FakeNixl()
        self.aborted = 0
        self.numbers: dict[str, float] = {
            "vllm:nixl_xfer_time_seconds_count": 0,
            "vllm:nixl_bytes_transferred_sum": 0,
            "vllm:nixl_num_failed_transfers_total": 0,
            "vllm:nixl_num_kv_expired_reqs_total": 0,
            "vllm:external_prefix_cache_hits_total": 0,
            "vllm:prefix_cache_hits_total": 0,
        }

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json({"version": self.habits.version})

    async def _health(self, exchange: Exchange) -> None:
        await exchange.text(200 if self.habits.healthy else 503, b"")

    async def _models(self, exchange: Exchange) -> None:
        model = {
            "id": self.habits.model,
            "root": self.habits.root,
            "max_model_len": self.habits.context_tokens,
        }
        await exchange.json({"data": [model]})

    async def _metrics(self, exchange: Exchange) -> None:
        self._expire()
        numbers = self.numbers | {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0.25,
        }
        lines = [f'{name}{{engine="0",model_name="toy"}} {n}' for name, n in numbers.items()]
        info = f'block_size="{BLOCK_TOKENS}",cache_dtype="auto",num_gpu_blocks="1024"'
        page = "\n".join(["# HELP x y", *lines, f"vllm:cache_config_info{{{info}}} 1.0", ""])
        await exchange.text(200, page.encode(), "text/plain")

    def _expire(self) -> None:
        with self.nixl.lock:
            over = [
                key for key, (*_, until, _) in self.nixl.kept.items() if until < time.monotonic()
            ]
            mine = [key for key in over if self.nixl.kept[key][3] == self.url]
            for key in mine:
                del self.nixl.kept[key]
            self.numbers["vllm:nixl_num_kv_expired_reqs_total"] += len(mine)

    async def _completions(self, exchange: Exchange) -> None:
        await self._serve(exchange, exchange.body.get("prompt", []), exchange.body)

    async def _generate(self, exchange: Exchange) -> None:
        if not self.habits.token_level:
            await exchange.error(403, "start with --enable-scale-out")
        elif not exchange.body:
            await exchange.error(400, "token_ids: Field required")
        else:
            sampling = exchange.body.get("sampling_params", {})
            await self._serve(exchange, exchange.body.get("token_ids", []), sampling)

    async def _serve(self, exchange: Exchange, ids: list[int], sampling: dict[str, Any]) -> None:
        if self.habits.reject:
            await exchange.error(self.habits.reject, "rejected before the engine")
            return
        params = exchange.body.get("kv_transfer_params")
        self.running += 1
        try:
            while self.habits.hangs and not exchange.left:
                await exchange.wait(0.05)
            if params is not None and params.get("do_remote_decode"):
                await self._prefill(exchange, ids, sampling, params)
            else:
                params = params or {}
                cached = self._fetch(exchange, ids, params) if params else 0
                # What prefill says that it had cached, decode repeats.
                told = params.get("remote_prefill_cached_tokens", cached)
                await self._answer(exchange, ids, sampling, told)
        finally:
            self.running -= 1
            self.aborted += exchange.left

    async def _prefill(
        self, exchange: Exchange, ids: list[int], sampling: dict[str, Any], params: dict[str, Any]
    ) -> None:
        body = exchange.body
        self.see(params == _PREFILL, f"prefill's kv_transfer_params: {params}")
        self.see(body.get("stream") is False, "a prefill is not streamed")
        self.see("stream_options" not in body, "a prefill has no stream_options")
        self.see(sampling.get("max_tokens") == 1, "a prefill is of one token")
        self.see(sampling.get("min_tokens", 0) <= 1, "a prefill needs min_tokens <= 1")
        name = self._named(exchange)
        await exchange.wait(self.habits.step_s)
        if exchange.left:
            return
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 2 + len(ids) // BLOCK_TOKENS))],
            "remote_engine_id": f"engine-{self.port}",
            "remote_request_id": f"cmpl-{name}-0-abc",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(ids),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        until = time.monotonic() + self.habits.lease_s
        given = {key: value for key, value in given.items() if key not in self.habits.forgets}
        with self.nixl.lock:
            self.nixl.kept[f"cmpl-{name}-0-abc"] = (given, list(ids), until, self.url)
        token = self.habits.tokens(ids, sampling, seed="seed").next()
        finish = "stop" if token in sampling.get("stop_token_ids", ()) else "length"
        answer = {
            "id": f"cmpl-{name}",
            "request_id": f"generate-tokens-{name}",
            "kv_transfer_params": None if self.habits.null_params else given,
            "choices": [self._choice([token], finish, sampling) | {"prompt_token_ids": ids}],
        }
        await exchange.json(answer | self._usage(ids, 1, 0))

    def _fetch(self, exchange: Exchange, ids: list[int], params: dict[str, Any]) -> int:
        """How many tokens' KV is fetched; 0 where the prompt is silently computed again."""
        if any(params.get(name) is None for name in _NEEDED):
            return 0
        key = params["remote_request_id"]
        with self.nixl.lock:
            given, kept_ids, until, _ = self.nixl.kept.get(key, ({}, [], 0.0, ""))
            if until < time.monotonic():
                return 0
            del self.nixl.kept[key]
        self.see(params == given, f"transfer params were altered: {params} instead of {given}")
        self.see(list(params) == list(given), "transfer params were put in another order")
        self.see(kept_ids == ids, "decode asks with another prompt than prefill")
        self.see(self._named(exchange) in key, "another X-Request-Id than prefill's")
        self.numbers["vllm:nixl_xfer_time_seconds_count"] += 1
        self.numbers["vllm:nixl_bytes_transferred_sum"] += 1000 * len(ids)
        self.numbers["vllm:external_prefix_cache_hits_total"] += len(ids) - 1
        return len(ids) - 1

    async def _answer(
        self, exchange: Exchange, ids: list[int], sampling: dict[str, Any], cached: int
    ) -> None:
        tokens, made, finish = self.habits.tokens(ids, sampling, seed="seed"), 0, None
        if not exchange.body.get("stream"):
            self.see(sampling.get("max_tokens") == 1, "only answers of one token come whole")
            first = tokens.next()
            answer = {"id": "cmpl-1", "request_id": "1", "kv_transfer_params": None}
            finish = "stop" if first in sampling.get("stop_token_ids", ()) else "length"
            choices = [self._choice([first], finish, sampling)]
            await exchange.json(answer | {"choices": choices} | self._usage(ids, 1, cached))
            return
        stops = set(sampling.get("stop_token_ids", ()))
        while finish is None and not exchange.left:
            new: list[int] = []
            while finish is None and len(new) < self.habits.tokens_per_event:
                new.append(tokens.next())
                made += 1
                if new[-1] in stops:
                    finish = "stop"
                elif made == sampling.get("max_tokens"):
                    finish = "length"
            await exchange.wait(self.habits.step_s)
            if exchange.left or await self.misbehaves(exchange, made):
                return
            choice = self._choice(new, finish, sampling)
            await exchange.event({"id": "cmpl-1", "request_id": "1", "choices": [choice]})
        if exchange.left:
            return
        if exchange.body.get("stream_options", {}).get("include_usage"):
            last = {"id": "cmpl-1", "request_id": "1", "choices": []}
            await exchange.event(last | self._usage(ids, made, cached))
        await exchange.done()

    def _choice(
        self, ids: list[int], finish: str | None, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "stop_reason": None}
        choice["finish_reason"] = finish
        n_top = sampling.get("logprobs")
        if n_top is None:
            return choice
        names = [f"token_id:{token}" for token in ids]
        if self.habits.token_level:
            content = [
                {
                    "token": name,
                    "logprob": toy_logprob(token),
                    "top_logprobs": [
                        {"token": f"token_id:{token + n}", "logprob": toy_logprob(token, n)}
                        for n in range(n_top)
                    ],
                }
                for name, token in zip(names, ids, strict=True)
            ]
            return choice | {"logprobs": {"content": content}}
        top = [
            {f"token_id:{token + n}": toy_logprob(token, n) for n in range(n_top)} for token in ids
        ]
        told = {
            "tokens": names,
            "token_logprobs": [toy_logprob(token) for token in ids],
            "top_logprobs": top,
            "text_offset": [0] * len(ids),
        }
        return choice | {"logprobs": told}

    def _usage(self, ids: list[int], made: int, cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": made}
        usage["total_tokens"] = len(ids) + made
        if self.habits.details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"usage": usage}

    def _named(self, exchange: Exchange) -> str:
        name = exchange.headers.get("x-request-id", "")
        self.see(bool(name), "a leg without X-Request-Id")
        return name
