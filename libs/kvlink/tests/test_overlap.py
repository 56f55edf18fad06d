import pytest

from diptych_kvlink.overlap import Overlap


def test_what_the_links_thread_does_during_compute_is_hidden() -> None:
    overlap = Overlap()
    overlap.export_began(1.0, last=False)
    overlap.export_ended(1.25)
    overlap.batch_began(1.25)
    overlap.batch_ended(2.25)
    assert overlap.computed_s is None
    overlap.export_began(3.0, last=True)
    overlap.export_ended(3.25)
    overlap.batch_began(3.25)
    overlap.batch_ended(3.75)

    assert overlap.computed_s == 3.0
    assert overlap.moving_s == 2.0
    assert overlap.frac == 0.5


def test_a_batch_that_outlasts_compute_is_hidden_in_part() -> None:
    overlap = Overlap()
    overlap.export_began(0.0, last=False)
    overlap.export_ended(0.0)
    overlap.batch_began(0.0)
    overlap.export_began(1.0, last=True)
    overlap.export_ended(1.0)
    overlap.batch_ended(4.0)

    assert overlap.frac == 0.25


@pytest.mark.parametrize("blocks", [1, 3])
def test_where_nothing_was_computed_in_between_nothing_is_hidden(blocks: int) -> None:
    overlap = Overlap()
    assert overlap.frac == 0.0
    for index in range(blocks):
        overlap.export_began(1.0, last=index == blocks - 1)
        overlap.export_ended(1.0)
    overlap.batch_began(1.0)
    overlap.batch_ended(2.0)
    assert overlap.frac == 0.0


def test_the_first_time_the_last_block_is_exported_counts() -> None:
    overlap = Overlap()
    overlap.export_began(1.0, last=True)
    overlap.export_began(5.0, last=True)
    assert overlap.computed_s == 1.0
