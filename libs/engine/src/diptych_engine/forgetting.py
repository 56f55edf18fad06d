"""Tenants whose cached prefixes are to go: asked for on any thread, done on the engine's."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition

from diptych_engine.port import StepReport
from diptych_engine.prefix_reuse import PrefixReuse


class Forgetting:
    """The tenants that wait to be forgotten.

    Args:
        changed: Guards this and the loop, and wakes it.
    """

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._waiting: list[tuple[str, Future[int]]] = []
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def submit(self, tenant: str) -> "Future[int]":
        """Have `tenant` forgotten at the next turn; gives how many sequences were dropped."""
        done: Future[int] = Future()
        with self._changed:
            if self._closed:
                done.cancel()
            else:
                self._waiting.append((tenant, done))
                self._changed.notify()
        return done

    def turn(self, prefixes: PrefixReuse, listener: Callable[[StepReport], None]) -> None:
        """Forget all that wait, and report which blocks are gone."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for tenant, done in waiting:
            dropped = prefixes.forget(tenant)
            stored, removed = prefixes.changes()
            listener(
                StepReport(news=(), duration_s=0.0, blocks_stored=stored, blocks_removed=removed)
            )
            if done.set_running_or_notify_cancel():
                done.set_result(dropped)

    def close(self) -> None:
        """Forget no more."""
        with self._changed:
            self._closed = True
            for _, done in self._waiting:
                done.cancel()
            self._waiting.clear()
