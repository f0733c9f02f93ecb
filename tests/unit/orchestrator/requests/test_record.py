"""Every request ends once, tokens come in order, and only the table's moves are made."""

import itertools
from dataclasses import replace

import pytest

from baton.errors import BatonError, UnavailableError
from baton.results.timings import DraftCounts, SpeculationTrace
from baton.sampling_params import SamplingParams
from baton.types import DraftRound, FinishReason, RequestId, SampledToken, TokenEvent
from orchestrator.requests.record import Attempt, RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.states import TRANSITIONS, RequestMove, RequestState
from tests.support.manual_clock import StoppedClock


def record(output_ids: tuple[int, ...] = ()) -> RequestRecord:
    outputs = (output_ids,) if output_ids else ()
    return RequestRecord.of(Request(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=9), outputs), 5)


def token(index: int, unix_ns: int = 50) -> TokenEvent:
    return TokenEvent(index, SampledToken(40 + index), "x", unix_ns)


def placed(made: RequestRecord, residency: str = "", num_cached_tokens: int = 0) -> RequestRecord:
    made.admit(StoppedClock(10))
    made.place(StoppedClock(20), Attempt(residency=residency, num_cached_tokens=num_cached_tokens))
    return made


def streaming() -> RequestRecord:
    made = placed(record())
    made.accept(token(0))
    return made


def test_every_state_but_the_last_can_end_and_nothing_follows_the_end() -> None:
    ends = {state for state, move in TRANSITIONS if move is RequestMove.FINISH}
    assert ends == set(RequestState) - {RequestState.FINISHED}
    assert not [state for state, _ in TRANSITIONS if state is RequestState.FINISHED]


def test_every_state_is_reached() -> None:
    assert set(TRANSITIONS.values()) == set(RequestState) - {RequestState.QUEUED}


@pytest.mark.parametrize(("state", "move"), list(itertools.product(RequestState, RequestMove)))
def test_a_move_that_is_not_in_the_table_is_a_bug(state: RequestState, move: RequestMove) -> None:
    made = record()
    made.state = state
    if (state, move) in TRANSITIONS:
        made.advance(move)
        assert made.state is TRANSITIONS[state, move]
    else:
        with pytest.raises(AssertionError, match=f"no {move.value} in state {state.value}"):
            made.advance(move)


def test_an_attempt_that_is_planned_anew_is_not_another_one() -> None:
    made = placed(record())
    made.replan()
    assert (made.state, made.attempt.number) == (RequestState.PLACING, 1)
    made.place(StoppedClock(30))


def test_usage_counts_cached_tokens_of_the_prompt() -> None:
    """Not those of an output that the prompt of a later attempt ends with."""
    made = placed(record(), num_cached_tokens=4)
    made.accept(token(0))
    assert made.finish(70, FinishReason.LENGTH).usage.num_cached_tokens == 3


def test_the_end_carries_usage_and_timings() -> None:
    made = streaming()
    made.accept(token(1, unix_ns=60))
    finished = made.finish(70, FinishReason.LENGTH)
    usage = finished.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_attempts) == (3, 2, 1)
    times = finished.timings
    stages = (times.received_ns, times.admitted_ns, times.leased_ns, times.first_token_ns, times.finished_ns)
    assert stages == (5, 10, 20, 50, 70)


def test_a_second_end_is_a_bug() -> None:
    made = streaming()
    made.finish(70, FinishReason.LENGTH)
    with pytest.raises(AssertionError, match="no finish in state finished"):
        made.finish(80, FinishReason.ERROR, UnavailableError("late"))


def test_a_retry_goes_on_after_the_tokens_that_were_sent() -> None:
    made = streaming()
    made.retry()
    assert (made.state, made.attempt.number) == (RequestState.PLACING, 2)
    assert (made.num_tokens, made.request.capacity_tokens) == (4, 12)
    made.place(StoppedClock(80))
    made.accept(token(1, unix_ns=90))
    assert made.output_ids == [40, 41]
    assert made.finish(99, FinishReason.STOP).timings.first_token_ns == 50


@pytest.mark.parametrize("index", [0, 2])
def test_a_token_twice_or_missing_is_refused(index: int) -> None:
    made = streaming()
    with pytest.raises(BatonError, match=f"sent token {index} where 1 is due"):
        made.accept(token(index))
    assert made.output_ids == [40]


def of_choices(n: int, outputs: tuple[tuple[int, ...], ...] = ()) -> RequestRecord:
    params = SamplingParams(max_tokens=9, n=n, seed=7)
    return placed(RequestRecord.of(Request(RequestId("r"), (1, 2, 3), params, outputs), 5))


def test_choices_share_an_attempt_until_one_has_a_token() -> None:
    made = of_choices(3)
    assert (made.request.num_slots, made.num_tokens, made.output_ids, made.is_apart) == (3, 3, [], False)
    made.accept(replace(token(0), choice=1))
    assert made.is_apart


def test_each_choice_counts_its_own_tokens_and_ends_alone() -> None:
    made = of_choices(2)
    made.accept(replace(token(0), choice=1))
    made.accept(replace(token(1), choice=1, finish=FinishReason.STOP))
    assert made.accept(replace(token(2), choice=1)) is None  # it has ended
    made.accept(token(0))
    assert (made.is_complete, made.num_output_tokens) == (False, 3)
    made.accept(replace(token(1), token=None, finish=FinishReason.LENGTH))
    assert made.finish(99).reasons == (FinishReason.LENGTH, FinishReason.STOP)


def test_a_choice_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(BatonError, match="sent choice 2 of 2"):
        of_choices(2).accept(replace(token(0), choice=2))


def test_a_failed_attempt_of_several_choices_goes_on_choice_by_choice() -> None:
    made = of_choices(3)
    made.accept(replace(token(0), choice=1))
    made.accept(replace(token(0), choice=2, finish=FinishReason.STOP))
    made.retry()
    first, second = made.branches()
    assert [branch.request_id for branch in (first, second)] == ["r/0", "r/1"]
    assert [branch.request.params.seed for branch in (first, second)] == [7, 8]
    assert [branch.num_tokens for branch in (first, second)] == [3, 4]
    for branch in (first, second):
        branch.place(StoppedClock(30))
    assert second.accept(token(1, unix_ns=90)) == replace(token(1, unix_ns=90), choice=1)
    second.retry()
    assert made.choices[1].output_ids == [40, 41]
    made.merge([first, second])
    assert (made.attempt.number, made.first_token_ns) == (3, 50)
    assert made.attempt.leased_ns == 30  # of the attempt that was placed last


def test_an_end_with_choices_that_have_not_ended_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="choices that have not"):
        of_choices(2).finish(99)


def test_a_resumed_request_goes_on_after_each_choice_s_tokens() -> None:
    made = of_choices(2, outputs=((40,), ()))
    assert (made.request.is_resumed, made.is_apart, made.num_output_tokens) == (True, True, 1)


def test_what_an_attempt_learns_ends_with_it_and_its_group_is_avoided_by_all_later_ones() -> None:
    made = placed(record(), "device", num_cached_tokens=2)
    made.blame("life")
    assert (made.attempt.blamed, made.attempt.residency, made.avoid) == ("life", "device", {"life"})
    made.retry()
    assert made.attempt == Attempt(number=2)
    assert made.avoid == {"life"}
    (branch,) = made.branches()
    branch.blame("another")
    assert made.avoid == {"life"}


def test_only_the_first_token_that_is_passed_on_is_timed() -> None:
    made = streaming()
    made.see_token(60)
    made.see_token(70)
    assert made.first_seen_s == 60


def test_choices_that_were_complete_before_and_those_at_the_deadline_end_in_events() -> None:
    params = SamplingParams(max_tokens=9, n=2)
    request = Request(RequestId("r"), (1, 2, 3), params, ((40,), (50, 51)), (FinishReason.STOP, None))
    made = RequestRecord.of(request, 5)
    assert [(end.choice, end.index, end.finish) for end in made.end_known(5)] == [(0, 1, FinishReason.STOP)]
    assert not made.is_complete
    late = made.end_open(FinishReason.DEADLINE, 9)
    assert [(end.choice, end.index, end.finish) for end in late] == [(1, 2, FinishReason.DEADLINE)]
    assert made.is_complete


def step(made: RequestRecord, *indices: int, choice: int = 0, drafts: DraftRound | None = None) -> None:
    """A step's tokens, the last of which tells what was verified."""
    for index in indices:
        told = drafts if index == indices[-1] else None
        made.accept(replace(token(index), choice=choice, drafts=told))


def ended(made: RequestRecord) -> SpeculationTrace | None:
    made.end_open(FinishReason.LENGTH, 95)
    return made.finish(99).timings.speculation


def test_steps_and_drafts_are_counted_over_choices_and_attempts() -> None:
    made = of_choices(2)
    step(made, 0)
    step(made, 1, 2, 3, drafts=DraftRound("streaming", 3, 2, 3))
    step(made, 0, choice=1)
    made.blame("life")
    made.retry()
    first, second = made.branches()
    for each in (first, second):
        each.place(StoppedClock(30))
    step(first, 4, 5, drafts=DraftRound("ngram", 4, 2, 2))
    second_round = DraftRound("streaming", 2, 0, 1)
    second.accept(replace(token(1), drafts=second_round))
    made.merge([first, second])
    sources = DraftCounts("streaming", 2, 5, 2), DraftCounts("ngram", 1, 4, 2)
    assert ended(made) == SpeculationTrace(5, sources)


def test_a_stream_without_drafts_tells_nothing_of_them() -> None:
    made = streaming()
    step(made, 1)
    assert ended(made) is None


def test_a_round_of_which_the_client_had_the_first_tokens_is_a_step() -> None:
    made = placed(record((40, 41)))
    step(made, 2, drafts=DraftRound("streaming", 3, 3, 3))
    step(made, 3, 4, drafts=DraftRound("streaming", 3, 1, 2))
    assert ended(made) == SpeculationTrace(2, (DraftCounts("streaming", 2, 6, 4),))
