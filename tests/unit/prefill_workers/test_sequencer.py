"""What was served is remembered. Order of turns is tested where turns are given: test_engine."""

from baton.ids import JobId
from prefill_workers.sequencer import Sequencer


def test_buried_number_is_remembered() -> None:
    sequencer = Sequencer()
    sequencer.bury(JobId(5))
    assert sequencer.is_buried(JobId(5))
    assert not sequencer.is_buried(JobId(4))


def test_memory_of_numbers_is_bounded_and_forgets_the_oldest() -> None:
    sequencer = Sequencer()
    for number in range(5000):
        sequencer.bury(JobId(number))
    assert sequencer.is_buried(JobId(4999))
    assert sequencer.is_buried(JobId(4999 - 4095))
    assert not sequencer.is_buried(JobId(0))


def test_empty_sequencer_has_nobody_to_serve() -> None:
    sequencer = Sequencer()
    assert sequencer.next_runnable() is None
    assert sequencer.take_over() == []
    assert len(sequencer) == 0
