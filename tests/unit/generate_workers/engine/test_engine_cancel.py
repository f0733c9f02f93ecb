"""Cancelling and closing: in every phase everything is freed within one step; and leases that end under a stream."""

import dataclasses
from collections.abc import Callable

import pytest

from baton.errors import InvalidArgumentError, LeaseExpiredError, StaleStampError, UnavailableError
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, LeaseRef, SampledToken, SlotId, Stamp
from generate_workers.engine.rows import StreamId
from tests.support.engines.generation import Collector, Harness, harness, prompt, reference_ids
from tests.support.engines.slot_tables import is_empty, push_zeros
from tests.support.manual_clock import ManualClock

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


# Cancelling: in each phase, within one step, everything is freed.


def in_inbox(made: Harness) -> tuple[StreamId, Collector]:
    return made.submit(prompt(9), LONG)


def waiting_for_a_slot(made: Harness) -> tuple[StreamId, Collector]:
    blockers = [made.submit(prompt(5), SHORT) for _ in range(4)]
    made.engine.step()
    opened = made.submit(prompt(9), LONG)
    made.engine.step()
    assert len(blockers) == made.slots.ledger().num_active
    return opened


def leased(made: Harness) -> tuple[StreamId, Collector]:
    opened = made.submit(prompt(9), LONG, ref=made.reserve(9, 80).ref)
    made.engine.step()
    return opened


def committed(made: Harness) -> tuple[StreamId, Collector]:
    ref = made.reserve(9, 80).ref
    opened = made.submit(prompt(9), LONG, ref=ref)
    made.engine.step()
    made.push_and_commit(ref, prompt(9), LONG)
    return opened


def active(made: Harness) -> tuple[StreamId, Collector]:
    opened = committed(made)
    made.engine.step()
    made.engine.step()
    assert made.slots.ledger().num_active == 1
    return opened


def prefilling(made: Harness) -> tuple[StreamId, Collector]:
    opened = made.submit(prompt(60), LONG)
    made.engine.step()
    assert opened[1].events == []
    return opened


PHASES = [in_inbox, waiting_for_a_slot, leased, committed, active, prefilling]


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_frees_everything_within_one_step(phase: Callable[[Harness], tuple[StreamId, Collector]]) -> None:
    with harness(num_slots=4) as made:
        stream_id, stream = phase(made)
        made.engine.cancel(stream_id)
        made.engine.step()
        assert stream.finish is FinishReason.CANCELLED
        made.run()
        assert made.engine.status().num_streams == 0
        made.engine.cancel(stream_id)  # again: nothing happens
        made.engine.step()


@pytest.mark.parametrize("phase", PHASES)
def test_closing_the_engine_ends_streams_in_every_phase(
    phase: Callable[[Harness], tuple[StreamId, Collector]],
) -> None:
    with harness(num_slots=4) as made:
        _, stream = phase(made)
        made.engine.close()
        assert (stream.finish, stream.error[:33]) == (FinishReason.ERROR, "the generation engine is shutting")
        with pytest.raises(UnavailableError):
            made.submit(prompt(3), SHORT)


def test_cancelling_one_row_disturbs_no_other() -> None:
    with harness() as made:
        _, other = made.submit(prompt(20), SHORT)
        stream_id, _ = made.submit(prompt(9), LONG)
        made.engine.step()
        made.engine.cancel(stream_id)
        made.run()
        assert other.token_ids == reference_ids(made.decoder, prompt(20), SHORT)


def test_a_writer_inside_a_cancelled_lease_is_refused_and_then_all_is_free() -> None:
    with harness() as made:
        ref = made.reserve(9, 80).ref
        stream_id, _ = made.submit(prompt(9), LONG, ref=ref)
        with made.slots.open_push(ref):
            made.engine.cancel(stream_id)
            made.engine.step()
            assert made.slots.ledger().num_quarantined == 1
            with pytest.raises(StaleStampError):
                push_zeros(made.slots, ref, 9)
        assert is_empty(made.slots.ledger())


# Leases that end under a stream.


def test_an_expired_lease_ends_its_stream_with_an_error() -> None:
    clock = ManualClock(100.0)
    with harness(clock=clock) as made:
        _, stream = leased(made)
        clock.advance(5.0)
        made.engine.step()
        assert stream.finish is FinishReason.ERROR
        assert stream.error.startswith("LeaseExpiredError: ")


def test_an_aborted_lease_ends_its_stream_with_an_error() -> None:
    with harness() as made:
        ref = made.reserve(9, 80).ref
        _, stream = made.submit(prompt(9), LONG, ref=ref)
        made.engine.step()
        made.slots.abort(ref)
        made.engine.step()
        assert stream.error.startswith("StaleStampError: ")


def test_aborting_the_lease_of_a_running_row_cancels_it() -> None:
    with harness() as made:
        ref = made.reserve(9, 80).ref
        made.push_and_commit(ref, prompt(9), LONG)
        _, stream = made.submit(prompt(9), LONG, ref=ref)
        made.engine.step()
        made.slots.abort(ref)
        made.engine.step()
        assert stream.finish is FinishReason.CANCELLED


def test_a_first_token_that_the_model_does_not_have_ends_that_stream_alone() -> None:
    with harness() as made:
        _, other = made.submit(prompt(20), SHORT)
        ref = made.reserve(9, 80).ref
        made.push(ref, prompt(9))
        made.commit(ref, SampledToken(5000))
        _, stream = made.submit(prompt(9), LONG, ref=ref)
        made.run()
        assert stream.error.startswith("InvalidArgumentError: token 5000")
        assert other.finish is FinishReason.LENGTH


def test_a_stale_lease_opens_no_stream() -> None:
    with harness() as made:
        ref = made.reserve(9, 80).ref
        made.slots.abort(ref)
        with pytest.raises(StaleStampError):
            made.submit(prompt(9), LONG, ref=ref)


def test_an_expired_lease_opens_no_stream() -> None:
    clock = ManualClock(100.0)
    with harness(clock=clock) as made:
        ref = made.reserve(9, 80).ref
        clock.advance(6.0)
        with pytest.raises(LeaseExpiredError):
            made.submit(prompt(9), LONG, ref=ref)


def test_a_lease_takes_one_stream_and_keeps_it() -> None:
    with harness() as made:
        ref = made.reserve(9, 80).ref
        stream_id, stream = made.submit(prompt(9), LONG, ref=ref)
        with pytest.raises(InvalidArgumentError, match="has a stream already"):
            made.submit(prompt(9), LONG, ref=ref)
        assert stream.events == []
        made.engine.cancel(stream_id)
        made.run()


def test_a_row_is_nobody_else_s_lease() -> None:
    with harness() as made:
        _, victim = made.submit(prompt(9), SHORT)
        made.engine.step()
        [row] = made.engine._running.rows.values()
        _, forged = made.submit(prompt(9), LONG, ref=row.ref)
        made.run()
        assert (forged.finish, victim.finish) == (FinishReason.ERROR, FinishReason.LENGTH)
        assert "is another row's" in forged.error


def test_a_slot_held_for_a_lease_s_other_choice_is_nobody_else_s_lease() -> None:
    params = dataclasses.replace(SHORT, n=2)
    with harness() as made:
        ref = made.reserve(9, 80, num_choices=2).ref
        _, choices = made.submit(prompt(9), params, ref=ref)
        _, forged = made.submit(prompt(9), LONG, ref=LeaseRef(SlotId(ref.slot + 1), Stamp(ref.stamp + 1)))
        made.run(forged)
        assert forged.finish is FinishReason.ERROR
        made.push_and_commit(ref, prompt(9), params)
        made.run()
        assert choices.choice(1).finish is FinishReason.LENGTH


def test_a_lease_of_another_length_is_refused_and_stays_its_owners() -> None:
    with harness() as made:
        ref: LeaseRef = made.reserve(9, 80).ref
        with pytest.raises(InvalidArgumentError, match="lease is for 9 tokens: prompt_ids and output_ids hold 10"):
            made.submit(prompt(10), LONG, ref=ref)
        made.push_and_commit(ref, prompt(9), SHORT)
        _, stream = made.submit(prompt(9), SHORT, ref=ref)
        made.run()
        assert stream.finish is FinishReason.LENGTH
