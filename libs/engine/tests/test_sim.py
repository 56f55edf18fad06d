import threading

import pytest

from diptych_contracts.cards import Fingerprint
from diptych_contracts.ids import RequestId
from diptych_contracts.sampling import Sampling, Stopping
from diptych_engine.port import (
    KvBlock,
    NewTokens,
    Phase,
    SequenceKey,
    SequenceWork,
    StepInput,
    StepReport,
)
from diptych_engine.sim import Cells, History, SimSettings, SimStepEngine, likeliest_after
from diptych_engine.sim_card import EOS_ID, sim_card, spoken_tokens
from diptych_engine.step_loop import StepLoop
from diptych_text.codec import TextCodec


class NoStops:
    stopped = False

    def push(self, token_ids: object) -> str:
        return ""


def engine(**changes: object) -> SimStepEngine:
    values: dict[str, object] = {
        "spoken": range(1, 50),
        "vocab_size": 50,
        "eos_ids": (0,),
        "fingerprint": Fingerprint(base="b", weights="w"),
        "context_tokens": 100,
        "kv_tokens": 200,
        "max_sequences": 2,
        "prefix_sequences": 2,
        "block_tokens": 4,
    }
    return SimStepEngine(SimSettings(**(values | changes)))  # type: ignore[arg-type]


def fill(sim: SimStepEngine, seq: int, tokens: range | list[int], at: int = 0) -> int:
    row = sim.step([StepInput(seq, at, list(tokens), want_logits=True)])[0]
    assert row is not None
    return int(row.argmax())


def test_the_next_token_depends_on_every_token_and_its_place() -> None:
    spoken = range(1, 1000)
    base = list(range(200))
    found = {likeliest_after(History(base), spoken)}
    for at in (0, 63, 64, 199):
        found.add(likeliest_after(History([*base[:at], 7, *base[at + 1 :]]), spoken))
    found.add(likeliest_after(History([1, 0, *base[2:]]), spoken))
    assert len(found) == 6


def test_a_history_that_grows_says_the_same_as_one_made_at_once() -> None:
    history = History()
    for token in range(150):
        history.tokens.append(token)
        assert history.number() == History(range(token + 1)).number()


def test_chunks_hand_over_and_sharing_change_nothing() -> None:
    sim = engine()
    expected = fill(sim, 0, range(1, 11))
    fill(sim, 1, range(1, 5))
    assert fill(sim, 1, range(5, 11), at=4) == expected
    out = memoryview(bytearray(sim.spec.layout.slot_bytes))
    assert sim.export_block(0, 4, 8, out) == sim.spec.layout.slot_bytes
    assert sim.fork(0, 2, 0, 4)
    sim.import_block(2, KvBlock(4, 8, out))
    assert fill(sim, 2, range(9, 11), at=8) == expected


def test_cells_are_counted_once_and_free_when_nobody_holds_them() -> None:
    sim = engine()
    fill(sim, 0, range(1, 11))
    sim.fork(0, 2, 0, 8)
    assert sim.cells_used == 10
    sim.drop(0)
    assert sim.cells_used == 8
    sim.drop(2)
    assert sim.cells_used == 0
    sim.drop(2)


def test_misuse_is_told() -> None:
    sim = engine(kv_tokens=8)
    with pytest.raises(ValueError, match="expected position 0"):
        fill(sim, 0, range(1, 3), at=1)
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        fill(sim, 0, [50])
    with pytest.raises(ValueError, match="no room for 9 tokens, 8 cells are free"):
        fill(sim, 0, range(1, 10))
    with pytest.raises(ValueError, match=r"sequence id 4 is not in \[0, 4\)"):
        fill(sim, 4, [1])
    with pytest.raises(ValueError, match="does not hold"):
        sim.fork(0, 1, 0, 1)
    fill(sim, 0, [1, 2])
    fill(sim, 1, [1])
    with pytest.raises(ValueError, match="sequence 1 ends at 1, expected 0"):
        sim.fork(0, 1, 0, 1)
    sim.close()
    assert sim.closed
    with pytest.raises(RuntimeError, match="after close"):
        fill(sim, 0, [1], at=2)


def test_cells_run_out() -> None:
    cells = Cells(3)
    taken = cells.take(2)
    cells.share(taken[:1])
    cells.give_back(taken)
    assert cells.used == 1
    cells.give_back(taken[:1])
    assert cells.used == 0


def test_the_built_in_card_needs_no_weights_and_speaks_plain_text() -> None:
    card = sim_card(model="sim")
    codec = TextCodec.from_card(card)
    text = codec.render([{"role": "user", "content": "thé 日"}])
    assert b"".join(codec.token_bytes(t) for t in codec.encode(text)).decode().count("日") == 1
    spoken = spoken_tokens(codec)
    assert EOS_ID not in spoken
    assert len(spoken) == 96
    assert "".join(codec.token_bytes(t).decode() for t in spoken).isprintable()


def test_drafts_change_when_tokens_come_and_not_which() -> None:
    """And a step that tells of several tokens counts those that were drafted."""
    reports: list[StepReport] = []
    done = threading.Event()

    def hear(report: StepReport) -> None:
        reports.append(report)
        if any(isinstance(n, NewTokens) and n.finish for n in report.news):
            done.set()

    answers: dict[int, list[int]] = {}
    for drafts in (0, 4):
        reports.clear()
        done.clear()
        sim = engine(draft_tokens=drafts, acceptance=0.8, prefix_sequences=0)
        loop = StepLoop(sim, lambda _stopping: NoStops())
        loop.start(hear)
        loop.submit(
            SequenceWork(
                key=SequenceKey(RequestId("r"), 1),
                phase=Phase.GENERATE,
                prompt_ids=(3, 4, 5),
                answer_ids=(),
                sampling=Sampling(temperature=0),
                stopping=Stopping(max_tokens=60),
            )
        )
        assert done.wait(60)
        loop.stop()
        told = [n for r in reports for n in r.news if isinstance(n, NewTokens)]
        answers[drafts] = [token for n in told for token in n.token_ids]
        assert [n.index for n in told] == [
            sum(len(n.token_ids) for n in told[:at]) for at in range(len(told))
        ]
        accepted = sum(r.accepted_drafts for r in reports)
        assert accepted == 60 - len(told)
        assert sum(r.drafts for r in reports) >= accepted
        assert sum(sum(r.tokens_by_key.values()) for r in reports) == 3 + 59
        assert sim.cells_used == 0
    assert answers[4] == answers[0]
    assert len(told) < 30
