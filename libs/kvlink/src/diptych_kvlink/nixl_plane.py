"""The thread that owns a NIXL agent: nobody else ever calls it.

An agent is not safe to share between threads, its calls may copy for milliseconds, and nothing of
it can be waited for. So one thread does all of it and looks what has become of it, sleeping in
between (spinning made a 16 KiB write 200 times slower on two cores; so did NIXL's own thread).

What is to be moved is a *program*, a generator that yields `Post`s and goes on when each is done.
What it was given to hold stays held until NIXL says that it is over: done, or its peer is gone. To
give up waiting ends nothing: a transfer let go of still writes, and reads its source when it does.

An error that is neither leaves it in doubt: part of it may still be on its way. NIXL flushes the
endpoint behind each transfer, and there is one endpoint per peer. So what a program names as its
*proof*, a small read posted after the failure, ends the doubt when it is done: all that was posted
to that peer before is over, too. If the endpoint is broken, the read says that the peer is gone.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from diptych_contracts.errors import DiptychError, Incompatible, LinkBroken, Permanent
from diptych_kvlink.nixl_library import library

log = logging.getLogger("diptych.kvlink")

Region = tuple[int, int, int]
"""Address, bytes, device: plain numbers. NIXL's own descriptors travel as pickles: never read."""
Result = TypeVar("Result")
_MOVING_PAUSE_S, _ATTENTIVE_PAUSE_S, _IDLE_PAUSE_S = 0.00005, 0.0005, 0.005
_START_S, _STOP_S = 30.0, 5.0
_PROVE_EVERY_S = 0.25
_GONE = "nixlRemoteDisconnectError"
_MOST_METADATA_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Post:
    """One NIXL transfer: `local[i]` to (`WRITE`) or from (`READ`) `remote[i]`."""

    op: str
    local: Sequence[Region]
    remote: Sequence[Region]
    peer: str


class PeerGone(LinkBroken):
    """NIXL says that the peer's process is not there any more."""


Program = Generator[Post, None, Result]


@dataclass(slots=True)
class _Running:
    program: Program[Any]
    future: Future[Any]
    holds: Callable[[], None]
    proof: Post | None = None
    handle: Any = None


@dataclass(slots=True)
class _InDoubt:
    """A transfer that failed, and may still move bytes."""

    running: _Running
    proof: Post
    prove_at_s: float
    """When the proof is tried next; infinity while it is being tried."""


@dataclass(slots=True)
class _Told:
    """What other threads leave for the plane's."""

    orders: deque[Callable[[], None]] = field(default_factory=deque)
    closing: bool = False


class Plane:
    """An agent, and its thread.

    Args:
        owner: The process's incarnation: part of the agent's name, beside a random one.
        network: See `nixl_library`.
        heard: Called on the thread with the name of an agent and what it sends. The name is what
            the sender says: it proves nothing.

    Raises:
        Permanent: there is no NIXL, or it does not start.
    """

    def __init__(
        self, owner: str, *, network: str, heard: Callable[[str, bytes], None] | None = None
    ) -> None:
        self.name = f"{owner}.{secrets.token_hex(4)}"
        self.attentive = False
        """Whether a peer may need this side's attention: it is looked after more often."""
        self._library = library(network)
        self._heard = heard
        self._agent: Any = None
        self._peers: dict[str, bytes] = {}
        self._running: list[_Running] = []
        self._doubtful: list[_InDoubt] = []
        self._told, self._wake = _Told(), threading.Condition()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="kv-nixl", daemon=True
        )
        self._thread.start()
        started.result(_START_S)

    @property
    def unfinished(self) -> int:
        """Programs whose memory must not be used for anything else yet."""
        return len(self._running) + len(self._doubtful)

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        """Have `work` done with the agent. What it raises is translated (`DiptychError`)."""
        future: Future[Result] = Future()

        def order() -> None:
            try:
                result = work(self._agent)
            except Exception as err:  # It belongs to who waits.
                future.set_exception(_translated(err))
            else:
                future.set_result(result)

        self._tell(order, future)
        return future

    def run(
        self, program: Program[Result], *, release: Callable[[], None], proof: Post | None = None
    ) -> Future[Result]:
        """Run `program`; `release` is called when nothing of it can move any more.

        Args:
            program: What to do.
            release: Of what it holds. A program without a `proof` must hold nothing.
            proof: A read from the peer that all its posts go to; see the module.
        """
        future: Future[Result] = Future()
        running = _Running(program, future, release, proof)
        self._tell(lambda: self._advance(running), future)
        return future

    def register(self, address: int, n_bytes: int) -> None:
        """Let peers reach this memory, for as long as the agent lives."""
        region = [(address, n_bytes, 0, "")]
        self.call(lambda agent: agent.register_memory(region, "DRAM")).result(_START_S)

    def metadata(self) -> bytes:
        """What a peer needs to talk to this agent, and to reach what is registered now. Secret."""
        return self.call(lambda agent: bytes(agent.get_agent_metadata())).result(_START_S)

    def load(self, name: str, metadata: bytes) -> None:
        """Know the peer `name`; on the plane's thread. Raises `Incompatible`, `LinkBroken`."""
        if self._peers.get(name) == metadata:
            return
        if name in self._peers or not 0 < len(metadata) <= _MOST_METADATA_BYTES:
            raise Incompatible(f"metadata of {name} that cannot be")
        try:
            given = self._agent.add_remote_agent(metadata)
        except Exception as err:
            raise _translated(err) from err
        seen = given.decode("ascii", "replace") if isinstance(given, bytes) else str(given)
        if seen != name:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(seen)
            self._peers.pop(seen, None)
            raise Incompatible(f"metadata of {seen:.200} where {name} was announced")
        self._peers[name] = metadata

    def unload(self, name: str) -> None:
        """Forget a peer, unless something to it is in doubt; on the plane's thread."""
        if any(doubt.proof.peer == name for doubt in self._doubtful):
            return
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def note(self, name: str, data: bytes) -> None:
        """Tell a loaded peer something; on the plane's thread. Raises `LinkBroken`."""
        try:
            self._agent.send_notif(name, data)
        except Exception as err:
            raise _translated(err) from err

    def close(self) -> None:
        """End the agent: nothing leaves or arrives through it any more. Idempotent."""
        with self._wake:
            self._told.closing = True
            self._wake.notify()
        self._thread.join(_STOP_S)

    def _tell(self, order: Callable[[], None], future: Future[Any]) -> None:
        with self._wake:
            if not self._told.closing:
                self._told.orders.append(order)
                self._wake.notify()
                return
        future.set_exception(LinkBroken("the link is closed"))

    def _run(self, started: "Future[None]") -> None:
        try:
            self._agent = self._made()
        except Exception as err:
            started.set_exception(Permanent(f"no NIXL link: {err!s:.200} ({type(err).__name__})"))
            return
        started.set_result(None)
        while not self._told.closing:
            for order in self._orders():
                order()
            self._look()
            self._prove()
            self._listen()
        self._end()

    def _made(self) -> Any:
        config = self._library.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._library.nixl_agent(self.name, config)
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        return agent

    def _orders(self) -> "deque[Callable[[], None]]":
        with self._wake:
            if not self._told.orders and not self._told.closing:
                self._wake.wait(self._pause_s())
            orders, self._told.orders = self._told.orders, deque()
            return orders

    def _pause_s(self) -> float:
        if self._running:
            return _MOVING_PAUSE_S
        return _ATTENTIVE_PAUSE_S if self.attentive else _IDLE_PAUSE_S

    def _look(self) -> None:
        for running in tuple(self._running):
            try:
                state = self._agent.check_xfer_state(running.handle)
            except Exception as err:
                self._failed(running, err)
                continue
            if state == "DONE":
                self._running.remove(running)
                self._let_go(running)
                self._advance(running)
            elif state != "PROC":
                self._failed(running, LinkBroken(f"NIXL says {state}"))

    def _listen(self) -> None:
        try:
            news = self._agent.get_new_notifs()
        except Exception as err:
            log.warning("kv link: NIXL: %s", err)
            return
        for name, notes in news.items():
            for data in notes:
                self._hear(str(name), data)

    def _hear(self, name: str, data: bytes) -> None:
        if self._heard is None:
            return
        try:
            self._heard(name, bytes(data))
        except Exception as err:  # Whatever a peer says, this thread goes on.
            log.warning("kv link: %.200s says what cannot be heard: %r", name, err)

    def _advance(self, running: _Running) -> None:
        """Go on until a post has to be waited for."""
        try:
            while True:
                if self._posted(running, next(running.program)):
                    return
        except StopIteration as over:
            running.holds()
            running.future.set_result(over.value)
        except Exception as err:  # Nothing of it moves: what did was done.
            running.holds()
            running.future.set_exception(_translated(err))

    def _posted(self, running: _Running, post: Post) -> bool:
        """Begin a transfer; whether it, or its failure, has to be waited for."""
        agent = self._agent
        local = agent.get_xfer_descs(post.local, "DRAM")
        remote = agent.get_xfer_descs(post.remote, "DRAM")
        running.handle = agent.initialize_xfer(post.op, local, remote, post.peer)
        self._running.append(running)
        try:
            state = agent.transfer(running.handle)
        except Exception as err:
            self._failed(running, err)
            return True
        if state == "PROC":
            return True
        if state != "DONE":
            self._failed(running, LinkBroken(f"NIXL says {state}"))
            return True
        self._running.remove(running)
        self._let_go(running)
        return False

    def _failed(self, running: _Running, err: Exception) -> None:
        """A posted transfer has failed: it is over if its peer is gone, and may go on if not."""
        self._running.remove(running)
        failure = _translated(err)
        if isinstance(failure, PeerGone) or running.proof is None:
            self._let_go(running)
            running.holds()
        else:
            log.warning("kv link: in doubt whether a write is over: %s", str(failure))
            self._doubtful.append(_InDoubt(running, running.proof, time.monotonic()))
        running.program.close()
        running.future.set_exception(failure)

    def _prove(self) -> None:
        """Try to prove that what is in doubt is over."""
        for doubt in tuple(self._doubtful):
            if time.monotonic() >= doubt.prove_at_s:
                doubt.prove_at_s = float("inf")
                proving: Future[None] = Future()
                proving.add_done_callback(partial(self._proved, doubt))
                self._advance(_Running(_posting(doubt.proof), proving, _nothing))

    def _proved(self, doubt: _InDoubt, proving: "Future[None]") -> None:
        failure = proving.exception()
        if failure is None or isinstance(failure, PeerGone):
            self._doubtful.remove(doubt)
            self._let_go(doubt.running)
            doubt.running.holds()
        else:
            doubt.prove_at_s = time.monotonic() + _PROVE_EVERY_S

    def _let_go(self, running: _Running) -> None:
        handle, running.handle = running.handle, None
        with contextlib.suppress(Exception):  # It is over: what is left is NIXL's bookkeeping.
            self._agent.release_xfer_handle(handle)

    def _end(self) -> None:
        unfinished = [*self._running, *(doubt.running for doubt in self._doubtful)]
        self._running.clear()
        self._doubtful.clear()
        for running in unfinished:
            running.program.close()
            if not running.future.done():
                running.future.set_exception(LinkBroken("the link is closed"))
        with self._wake:
            orders, self._told.orders = self._told.orders, deque()
        self._agent = None
        for order in orders:  # Each ends its caller's wait with an error.
            with contextlib.suppress(Exception):
                order()


def _posting(post: Post) -> Program[None]:
    yield post


def _nothing() -> None:
    """It holds nothing."""


def _translated(err: Exception) -> DiptychError:
    if isinstance(err, DiptychError):
        return err
    name = type(err).__name__
    if name == _GONE:
        return PeerGone(f"NIXL: the peer is gone ({err!s:.200})")
    return LinkBroken(f"NIXL: {name}: {err!s:.200}")
