"""Hands the KV blocks of a sequence to its sink, each once, in order, as soon as it is final."""

from diptych_engine.port import BlockSink, Phase, StepEngine
from diptych_engine.sequence import LiveSequence


def export(engine: StepEngine, sequence: LiveSequence, end: int, *, last: bool = False) -> None:
    """Hand over what is final up to position `end`: full blocks, and if it is the `last`, the tail.

    Of a prefill all blocks but those that decode has; of any work those it wants to have written
    too. What was restored is there already, and need not be read out of the engine.
    """
    work, size = sequence.work, engine.spec.layout.block_tokens
    if work.sink is None or work.phase is Phase.DECODE:
        return
    everything = work.phase is Phase.PREFILL
    while (p0 := sequence.exported * size) < end:
        p1 = min(p0 + size, end)
        if p1 - p0 < size and not (last and everything):
            return
        index = sequence.exported
        sequence.exported += 1
        if (everything and index >= work.held_blocks) or index in work.wanted:
            _write(engine, sequence, work.sink, index=index, span=(p0, p1))


def _write(
    engine: StepEngine,
    sequence: LiveSequence,
    sink: BlockSink,
    *,
    index: int,
    span: tuple[int, int],
) -> None:
    buffer, data = sink.buffer(index), sequence.restored.get(index)
    if data is None:
        sink.written(index, engine.export_block(sequence.seq, *span, buffer))
        return
    buffer.cast("B")[: data.nbytes] = data.cast("B")
    sink.written(index, data.nbytes)
