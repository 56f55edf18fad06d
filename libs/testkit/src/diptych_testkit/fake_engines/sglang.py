"""SGLang that is not there, as `engines.md` section 6 describes 0.5.23."""

import threading
from dataclasses import dataclass, field
from typing import Any

from diptych_engine.over_http.contract import Contract
from diptych_engine.sglang.contract import BOOTSTRAP, CONTRACT
from diptych_engine.sglang.rooms import FAKE_HOST
from diptych_testkit.fake_engines.habits import Habits, TokenServer
from diptych_testkit.fake_engines.strict_server import Exchange, StrictServer
from diptych_testkit.fake_engines.toy_tokens import ToyTokens, toy_logprob

_POLL_S = 0.005
_ROUTE = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@dataclass(kw_only=True)
class SglangHabits(Habits):
    """How it behaves."""

    version: str = "0.5.23"
    model_path: str = "/models/toy"
    mode: str = "null"
    cumulative: bool = True
    """Whether an event has the whole answer so far: without `--incremental-streaming-output`."""
    deterministic: bool = True
    abort_after: int | None = None
    """So many tokens, then an abort of its own, with status 200."""
    metrics: bool = True


@dataclass
class _Meeting:
    legs: set[str] = field(default_factory=set)
    transferred: bool = False
    failed: bool = False


class FakeBootstrap(StrictServer):
    """The bootstrap server of a prefill, and what goes on in its rooms."""

    def __init__(self) -> None:
        super().__init__(BOOTSTRAP, {"health": self._health, "route": self._route})
        self.registered = True
        self.lock = threading.Lock()
        self.rooms: dict[int, _Meeting] = {}

    async def _health(self, exchange: Exchange) -> None:
        await exchange.text(200, b"OK", "text/plain")

    async def _route(self, exchange: Exchange) -> None:
        if exchange.query != _ROUTE:
            self.faults.append(f"/route?{exchange.query} is not the readiness probe")
        if self.registered:
            await exchange.text(200, b'{"attn_tp_size":1,"dp_size":1,"pp_size":1}')
        else:
            await exchange.text(503, b"Prefill server not fully registered yet", "text/plain")

    def enter(self, room: int, leg: str) -> _Meeting:
        """Come to `room`; a room where the same leg was before is a fault."""
        with self.lock:
            meeting = self.rooms.setdefault(room, _Meeting())
            if leg in meeting.legs:
                self.faults.append(f"room {room} is used a second time")
            meeting.legs.add(leg)
            return meeting

    def holding(self) -> int:
        """Rooms in which one leg waits for the other."""
        with self.lock:
            return sum(not (m.transferred or m.failed) for m in self.rooms.values())


class FakeSglang(TokenServer):
    """One server.

    Args:
        bootstrap: The prefill's; both servers of a pair name it. None: it is alone.
        habits: How it behaves; may change while it runs.
        contract: What it takes and gives.
    """

    def __init__(
        self,
        bootstrap: FakeBootstrap | None = None,
        habits: SglangHabits | None = None,
        contract: Contract = CONTRACT,
    ) -> None:
        handlers = {
            "server_info": self._server_info,
            "model_info": self._health,
            "health": self._health,
            "health_generate": self._health_generate,
            "metrics": self._metrics,
            "abort_request": self._abort_request,
            "generate": self._generate,
        }
        self.habits = habits or SglangHabits()
        super().__init__(contract, handlers, self.habits, {"message": "it broke"})
        self.bootstrap = bootstrap
        self.aborted: set[str] = set()
        self._live: set[str] = set()

    async def _server_info(self, exchange: Exchange) -> None:
        info = {
            "version": self.habits.version,
            "model_path": self.habits.model_path,
            "disaggregation_mode": self.habits.mode,
            "disaggregation_transfer_backend": "mooncake",
            "context_length": None,
            "max_total_num_tokens": 16_384,
            "page_size": 1,
            "kv_cache_dtype": "auto",
            "enable_deterministic_inference": self.habits.deterministic,
        }
        if self.bootstrap is not None:
            info["disaggregation_bootstrap_port"] = self.bootstrap.port
        await exchange.json(info)

    async def _health(self, exchange: Exchange) -> None:
        await exchange.text(200, b"{}")

    async def _health_generate(self, exchange: Exchange) -> None:
        while self.habits.hangs and not exchange.left:
            await exchange.wait(_POLL_S)
        await exchange.text(200, b"")

    async def _metrics(self, exchange: Exchange) -> None:
        if not self.habits.metrics:
            await exchange.error(404, "Not Found")
            return
        is_prefill = self.bootstrap is not None and self.habits.mode == "prefill"
        pinned = self.bootstrap.holding() if self.bootstrap and is_prefill else 0
        numbers = {
            "sglang:num_running_reqs": self.running,
            "sglang:num_queue_reqs": 0,
            "sglang:num_used_tokens": 100,
            "sglang:num_prefill_inflight_queue_reqs": pinned,
        }
        page = "".join(f'{name}{{model_name="toy"}} {n}\n' for name, n in numbers.items())
        await exchange.text(200, page.encode(), "text/plain")

    async def _abort_request(self, exchange: Exchange) -> None:
        self.aborted.add(exchange.body.get("rid", ""))
        await exchange.text(200, b"")

    async def _generate(self, exchange: Exchange) -> None:
        body, mode = exchange.body, self.habits.mode
        if self.habits.reject:
            await exchange.error(self.habits.reject, "rejected before the engine")
            return
        room = body.get("bootstrap_room")
        if mode != "null" and room is None:
            self.faults.append("a disaggregated server was asked without a room")
            await exchange.error(400, "Disaggregated request received without bootstrap room id.")
            return
        name = body.get("rid", "")
        self.see(name not in self._live, f"rid {name} runs twice")
        self.see(body.get("stream") is True, "both legs get the same body: it is streamed")
        self._live.add(name)
        self.running += 1
        try:
            meeting = self._meet(body, mode) if mode != "null" else None
            while self.habits.hangs and not self._gone(exchange):
                await exchange.wait(_POLL_S)
            if mode == "prefill":
                await self._prefill(exchange, meeting)
            elif meeting is None or await self._fetch(exchange, meeting):
                await self._answer(exchange)
        finally:
            self.running -= 1
            self._live.discard(name)

    def _meet(self, body: dict[str, Any], mode: str) -> _Meeting:
        assert self.bootstrap is not None
        room, host, port = (body.get(f"bootstrap_{name}") for name in ("room", "host", "port"))
        self.see(host != FAKE_HOST, "the fake host was asked for")
        self.see(host == "127.0.0.1", f"bootstrap_host {host}")
        self.see(port == self.bootstrap.port, f"bootstrap_port {port}")
        self.see(isinstance(room, int) and 0 <= room < 1 << 63, f"bootstrap_room {room}")
        return self.bootstrap.enter(room or 0, mode)

    async def _prefill(self, exchange: Exchange, meeting: _Meeting | None) -> None:
        assert meeting is not None
        await exchange.wait(self.habits.step_s)
        while "decode" not in meeting.legs and not self._gone(exchange):
            await exchange.wait(_POLL_S)
        if self._gone(exchange) or meeting.failed:
            meeting.failed = True
            await self._aborted(exchange, None)
            return
        token = self._tokens(exchange.body).next()
        meeting.transferred = True
        if await self._breaks_off(exchange, 1):
            return
        finish = {"type": "length", "length": 1}
        await exchange.event(self._event(exchange.body, [token], 1, finish, 1))
        await exchange.done()

    async def _fetch(self, exchange: Exchange, meeting: _Meeting) -> bool:
        while not (meeting.transferred or meeting.failed or self._gone(exchange)):
            await exchange.wait(_POLL_S)
        if meeting.transferred:
            return True
        meeting.failed = True
        await self._aborted(exchange, None if self._gone(exchange) else 500)
        return False

    async def _aborted(self, exchange: Exchange, status: int | None) -> None:
        if exchange.left:
            return
        finish = {"type": "abort", "message": "KVTransferError", "status_code": status}
        await exchange.event(self._event(exchange.body, [], 0, finish, 0))
        await exchange.done()

    def _gone(self, exchange: Exchange) -> bool:
        name = exchange.body.get("rid", "")
        return exchange.left or any(name.startswith(begun) for begun in self.aborted)

    async def _answer(self, exchange: Exchange) -> None:
        sampling = exchange.body.get("sampling_params", {})
        tokens, made, finish = self._tokens(exchange.body), list[int](), None
        stops = set(sampling.get("stop_token_ids", ()))
        while finish is None and not self._gone(exchange):
            new: list[int] = []
            while finish is None and len(new) < self.habits.tokens_per_event:
                new.append(tokens.next())
                made.append(new[-1])
                if new[-1] in stops:
                    finish = {"type": "stop", "matched": new[-1]}
                elif len(made) == sampling.get("max_new_tokens"):
                    finish = {"type": "length", "length": len(made)}
            await exchange.wait(self.habits.step_s)
            if exchange.left or await self._breaks_off(exchange, len(made)):
                return
            await exchange.event(self._event(exchange.body, made, len(made), finish, len(new)))
        if self._gone(exchange):
            await self._aborted(exchange, None)
        else:
            await exchange.done()

    async def _breaks_off(self, exchange: Exchange, made: int) -> bool:
        after = self.habits.abort_after
        if after is not None and made > after:
            await self._aborted(exchange, 500)
            return True
        return await self.misbehaves(exchange, made)

    def _tokens(self, body: dict[str, Any]) -> ToyTokens:
        sampling = body.get("sampling_params", {})
        return self.habits.tokens(body.get("input_ids", []), sampling, seed="sampling_seed")

    def _event(
        self,
        body: dict[str, Any],
        ids: list[int],
        made: int,
        finish: dict[str, Any] | None,
        n_new: int,
    ) -> dict[str, Any]:
        """An event; `ids` are all of the answer so far, of which the last `n_new` are new."""
        shown = ids if self.habits.cumulative else ids[len(ids) - n_new :]
        meta: dict[str, Any] = {
            "id": body.get("rid"),
            "finish_reason": finish,
            "prompt_tokens": len(body.get("input_ids", [])),
            "completion_tokens": made,
            "cached_tokens": 0,
        }
        if body.get("return_logprob"):
            n_top = body.get("top_logprobs_num", 0)
            meta["output_token_logprobs"] = [[toy_logprob(token), token, None] for token in shown]
            meta["output_token_logprobs_length"] = made
            if n_top:
                meta["output_top_logprobs"] = [
                    [[toy_logprob(token, n), token + n, None] for n in range(n_top)]
                    for token in shown
                ]
        return {"text": None, "output_ids": shown, "meta_info": meta}
