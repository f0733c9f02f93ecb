"""A stream's hook: it gets each row that has its last token, with its slot, and hears of the stream's end once."""

import dataclasses

import pytest

from baton.sampling_params import SamplingParams
from baton.types import FinishReason, LeaseRef, RequestId
from generate_workers.engine.rows import GenerationRequest, Row, StreamId
from tests.support.engines.generation import Collector, Harness, harness, prompt
from tests.support.engines.slot_tables import is_empty

SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


class Hook:
    """Notes what it is told, and takes rows over if it is to."""

    def __init__(self, *, takes: bool) -> None:
        self.taken: list[LeaseRef] = []
        self.num_rows = 0
        self.num_ends = 0
        self._takes = takes

    def take_row(self, row: Row) -> bool:
        assert not self.num_ends
        self.num_rows += 1
        if self._takes:
            self.taken.append(row.ref)
        return self._takes

    def stream_ended(self) -> None:
        self.num_ends += 1


def submit(made: Harness, hook: Hook, params: SamplingParams = SHORT) -> tuple[StreamId, Collector]:
    events = Collector(num_choices=params.n)
    stream_id = made.engine.submit(GenerationRequest(RequestId("r"), prompt(9), (), params), events, hook)
    made.streams.append(events)
    return stream_id, events


@pytest.mark.parametrize("num_choices", [1, 3])
def test_rows_that_are_taken_over_hold_their_slots_until_the_hook_releases_them(num_choices: int) -> None:
    with harness() as made:
        hook = Hook(takes=True)
        made.run(submit(made, hook, dataclasses.replace(SHORT, n=num_choices))[1])
        assert (len(hook.taken), hook.num_ends) == (num_choices, 1)
        status = made.engine.status()
        assert (status.num_rows, status.ledger.num_active) == (0, num_choices)
        for ref in hook.taken:
            made.slots.release(ref)


def test_a_row_that_is_not_taken_over_is_freed_before_its_last_event() -> None:
    with harness() as made:
        hook = Hook(takes=False)
        seen: list[bool] = []
        events = Collector(on_end=lambda: seen.append(is_empty(made.slots.ledger())))
        made.engine.submit(GenerationRequest(RequestId("r"), prompt(9), (), SHORT), events, hook)
        made.run(events)
        assert (seen, hook.num_rows, hook.num_ends) == ([True], 1, 1)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_cancelled_stream_hands_over_nothing_and_ends(num_steps: int) -> None:
    with harness() as made:
        hook = Hook(takes=True)
        stream_id, events = submit(made, hook)
        for _ in range(num_steps):
            made.engine.step()
        made.engine.cancel(stream_id)
        made.run(events)
        assert (events.finish, hook.num_rows, hook.num_ends) == (FinishReason.CANCELLED, 0, 1)
        assert is_empty(made.slots.ledger())
