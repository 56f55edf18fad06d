"""A made-up world (`ledger_world`) with trouble in it, and what must be true when it is over."""

from random import Random

import msgspec

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason, Fence
from diptych_contracts.requests import RecordState
from diptych_policy.journal import RequestView, spoken
from diptych_policy.lifecycle import MemberWasLost, Ticked
from diptych_policy.voices import attempt_voice, owner_voice
from diptych_testkit.builders import GATEWAY
from diptych_testkit.forgeries import forgeries
from diptych_testkit.ledger_world import World
from diptych_testkit.world_members import TOKENS, said

_MARKABLE = (RecordState.QUEUED, RecordState.ROUTED)


class RoughWorld(World):
    """Members die, freeze and wake; gateways mark records.

    Args:
        seed: Of everything that happens.
        requests: How many there are.
        trouble_frac: How many steps are trouble.
    """

    def __init__(self, seed: int, *, requests: int = 4, trouble_frac: float = 0.02) -> None:
        super().__init__(Random(seed), requests=requests)
        self._trouble_frac = trouble_frac
        self.forged = 0

    def step(self) -> None:
        """The next thing."""
        drawn = self.rng.random()
        steps = self.choices()
        if drawn < self._trouble_frac:
            self.trouble()
        elif drawn < self._trouble_frac + 0.1 or not steps:
            self.tick(0.1)
        else:
            self.rng.choice(steps)()

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for scheduler in self.awake():
            scheduler.now_s += seconds
            for member in sorted(scheduler.ledger.peers() - {GATEWAY}):
                if self._silent(member):
                    scheduler.fleet.lost(member)
                    self.tell(scheduler, MemberWasLost(member))
            self.tell(scheduler, Ticked())

    def _silent(self, member: Incarnation) -> bool:
        scheduler = self.schedulers.get(member)
        return scheduler is None or scheduler.frozen

    def trouble(self) -> None:
        """Something that should not happen, but does."""
        match self.rng.randrange(8):
            case 0:
                self._kill_worker()
            case 1:
                self._freeze_worker()
            case 2:
                self._thaw_worker()
            case 3:
                self._kill_scheduler()
            case 4:
                self._freeze_scheduler()
            case 5:
                self._thaw_scheduler()
            case 6:
                self._cancel()
            case 7:
                self._forge()

    def _forge(self) -> None:
        """A worker speaks for what it was never given: the world goes on as if it had not."""
        request = self.rng.choice(list(self.requests.values()))
        kept = self.bucket.get(request.request_id)
        attempt = self.rng.randint(1, kept[0].attempt + 1 if kept else 1)
        others = [a for a in range(1, attempt + 3) if a != attempt]
        other = self.rng.choice(list(self.requests.values()))
        voices = [b"", b"x" * 16, attempt_voice(request.secret, self.rng.choice(others))]
        if other is not request:
            voices += [attempt_voice(other.secret, attempt), owner_voice(other.secret)]
        said = forgeries(
            request.request_id, attempt, self.rng.choice(voices), index=self.rng.randrange(TOKENS)
        )
        self.journal.append(self.rng.choice(said))
        self.forged += 1

    def _kill_worker(self) -> None:
        worker = self.rng.choice([w for w in self.workers.values() if w.up])
        worker.up = False
        del self.workers[worker.name]
        self.lose(worker.name)
        self.add_worker(worker.name[0])

    def _freeze_worker(self) -> None:
        worker = self.rng.choice(list(self.workers.values()))
        if not worker.frozen:
            worker.frozen = True
            self.lose(worker.name)

    def _thaw_worker(self) -> None:
        for worker in [w for w in self.workers.values() if w.frozen]:
            worker.frozen = False
            self.find(worker.name)

    def _kill_scheduler(self) -> None:
        scheduler = self.rng.choice(list(self.schedulers.values()))
        del self.schedulers[scheduler.name]
        self.lose(scheduler.name)
        self.add_scheduler()

    def _freeze_scheduler(self) -> None:
        if len(self.awake()) > 1:
            scheduler = self.rng.choice(self.awake())
            scheduler.frozen = True
            self.lose(scheduler.name)

    def _thaw_scheduler(self) -> None:
        for scheduler in [s for s in self.schedulers.values() if s.frozen]:
            scheduler.frozen = False
            for worker in self.workers.values():  # what it heard first on waking
                known = worker.up and not worker.frozen
                (scheduler.fleet.found if known else scheduler.fleet.lost)(worker.name)
            self.find(scheduler.name)

    def _cancel(self) -> None:
        """A gateway marks a record: its client has left, or it lost its patience."""
        live = [kept for kept in self.bucket.values() if kept[0].state in _MARKABLE]
        if not live or self.rng.random() < 0.6:
            return
        record, _ = self.rng.choice(live)
        if self.rng.random() < 0.7:
            self.write(msgspec.structs.replace(record, state=RecordState.CANCELLING))
            return
        end = End(request_id=record.request_id, attempt=record.attempt, reason=EndReason.EXPIRED)
        self.write(msgspec.structs.replace(record, state=RecordState.ENDING, end=end))
        if self.rng.random() < 0.7:  # else it dies before it can say so
            self.journal.append(spoken(end, record.secret))

    # The end

    def heal(self) -> None:
        """No more trouble: everything that is left must end by itself."""
        self._thaw_worker()
        self._thaw_scheduler()
        for _ in range(6000):
            steps = self.choices()
            if self.over() and not steps:
                return
            if steps:
                self.rng.choice(steps)()
            if self.rng.random() < 0.1 or not steps:
                self.tick(0.1)
        open_ = {r: self.bucket.get(r) for r in self.requests if not self._over(r)}
        raise AssertionError(f"these never ended: {open_}")

    def over(self) -> bool:
        return all(self._over(request_id) for request_id in self.requests)

    def _over(self, request_id: RequestId) -> bool:
        kept = self.bucket.get(request_id)
        return kept is not None and kept[0].state is RecordState.CLOSED

    def check_outcome(self) -> None:
        """Each request ended once, with an unbroken answer, and left nothing."""
        for request_id in self.requests:
            view = self.view(request_id)
            for part in self.journal:
                if part.request_id == request_id:
                    view.apply(part)
            record, _ = self.bucket[request_id]
            assert view.end is not None
            assert record.end == view.end, f"{request_id}: {record.end} is not {view.end}"
            assert view.token_ids == [said(request_id, n) for n in range(len(view.token_ids))]
            if view.end.reason is EndReason.LENGTH:
                assert len(view.token_ids) == TOKENS
            assert request_id not in self.stored
            assert f"{request_id}.end" in self.events
        for scheduler in self.schedulers.values():
            assert len(scheduler.ledger) == 0, f"{scheduler.name} still has live requests"
            scheduler.ledger.check()

    def fences(self) -> int:
        """How many attempts were announced."""
        fences = [part for part in self.journal if isinstance(part, Fence)]
        secret = {request_id: request.secret for request_id, request in self.requests.items()}
        return sum(part.voice == owner_voice(secret[part.request_id]) for part in fences)

    def refused(self) -> int:
        """How many parts every reader drops for their voice."""
        return sum(view.forged for view in self._views())

    def _views(self) -> list[RequestView]:
        views = {request_id: self.view(request_id) for request_id in self.requests}
        for part in self.journal:
            views[part.request_id].apply(part)
        return list(views.values())
