"""Transfers under any order of messages, deadlines and deaths: slots come back, once."""

from random import Random

import pytest

from diptych_contracts.ids import TransferId
from diptych_kvlink.ledger import OPEN, State, Transfer, TransferLedger

ENDS = (State.RELEASED, State.EXPIRED, State.FAILED)


class Transfers:
    """One side's ledger, and what happened to each of its transfers."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.ledger = TransferLedger(remembered=1000)
        self.now_s = 0.0
        self.opened = 0
        self.settled: list[TransferId] = []
        self.first_end: dict[TransferId, tuple[State, str]] = {}

    def step(self) -> None:
        self.now_s += self.rng.random()
        held = list(self.ledger)
        if not held or self.rng.random() < 0.2:
            self._open()
        else:
            self._happen(self.rng.choice(held))
        for transfer in self.ledger.expire(self.now_s):
            self._ended(transfer)
        self._settle()
        self.ledger.check()

    def _open(self) -> None:
        self.opened += 1
        transfer_id = TransferId(f"t{self.opened}")
        deadline_s = self.now_s + self.rng.uniform(0.1, 8.0)
        self.ledger.add(Transfer(transfer_id=transfer_id, deadline_s=deadline_s))

    def _happen(self, transfer: Transfer) -> None:
        match self.rng.randrange(6):
            case 0 | 1:
                self._advance(transfer, self.rng.choice(OPEN))
            case 2:
                transfer.renew(self.now_s + self.rng.uniform(-1.0, 5.0))
            case 3:
                if transfer.end(self.rng.choice(ENDS), "a message said so"):
                    self._ended(transfer)
            case 4 if not transfer.is_open or transfer.state in (State.WRITTEN, State.VERIFIED):
                transfer.writer_may_write = False
            case 5:
                transfer.reader_may_read = False

    def _advance(self, transfer: Transfer, state: State) -> None:
        before = transfer.state
        try:
            transfer.advance(state, deadline_s=self.now_s + 5.0)
        except ValueError:
            assert transfer.state is before
            return
        assert OPEN.index(transfer.state) > OPEN.index(before)
        transfer.reader_may_read = transfer.state is State.VERIFIED

    def _ended(self, transfer: Transfer) -> None:
        assert transfer.transfer_id not in self.first_end, "it ended twice"
        self.first_end[transfer.transfer_id] = (transfer.state, transfer.reason)

    def _settle(self) -> None:
        for transfer in self.ledger.take_settled():
            assert transfer.settled
            assert not transfer.writer_may_write
            assert not transfer.reader_may_read
            assert transfer.transfer_id not in self.settled, "its slots were freed twice"
            self.settled.append(transfer.transfer_id)
            assert self.first_end[transfer.transfer_id] == (transfer.state, transfer.reason)

    def everybody_stops(self) -> None:
        """Nobody says a word any more, and both sides are known to be gone."""
        self.now_s += 100.0
        for transfer in self.ledger.expire(self.now_s):
            self._ended(transfer)
        for transfer in self.ledger:
            transfer.writer_may_write = transfer.reader_may_read = False
        self._settle()


@pytest.mark.parametrize("seed", range(40))
def test_every_transfer_ends_once_and_frees_its_slots_once(seed: int) -> None:
    transfers = Transfers(seed)
    for _ in range(400):
        transfers.step()
    transfers.everybody_stops()
    assert list(transfers.ledger) == []
    assert sorted(transfers.settled) == sorted(f"t{n + 1}" for n in range(transfers.opened))
    for transfer_id in transfers.settled:
        with pytest.raises(ValueError, match="exists already"):
            transfers.ledger.add(Transfer(transfer_id=transfer_id, deadline_s=1.0))
