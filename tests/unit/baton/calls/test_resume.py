"""When a stream asks again, for what, and after how long; by a clock that the test moves."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.calls.requests import PromptInput, make_request
from baton.calls.resume import DEADLINE_GRACE_S, Reconnect, ServerState, StreamState
from baton.errors import (
    BatonError,
    DeadlineExceededError,
    DrainedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.types import FinishReason
from baton.v1 import common_pb2, generate_pb2, orchestrator_pb2
from tests.support.manual_clock import ManualClock

LOST = UnavailableError("gone")
RECONNECT = Reconnect(num_connects=2, num_resumes=3, first_delay_s=1.0, max_delay_s=4.0)


def state_at(clock: ManualClock, deadline_s: float | None = None) -> StreamState:
    request = make_request(PromptInput("Once"), None, {}, fields=orchestrator_pb2.GenerateRequest(request_id="r"))
    return StreamState(request, ServerState("host:1"), RECONNECT, clock, deadline_s=deadline_s)


def started(**fields: Any) -> orchestrator_pb2.GenerateEvent:
    return orchestrator_pb2.GenerateEvent(started=orchestrator_pb2.Started(request_id="r", model="m", **fields))


def started_at(clock: ManualClock, deadline_s: float | None = None) -> StreamState:
    state = state_at(clock, deadline_s)
    state.accept(started())
    return state


def failure_of(state: StreamState) -> BatonError:
    with pytest.raises(BatonError) as caught:
        state.raise_failure()
    return caught.value


@pytest.mark.parametrize(("num_failed", "longest_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0), (5000, 4.0)])
def test_delay_doubles_up_to_its_limit(num_failed: int, longest_s: float) -> None:
    assert RECONNECT.delay_s(num_failed, 0.0) == longest_s / 2
    assert RECONNECT.delay_s(num_failed, 1.0) == longest_s


def test_attempts_to_be_taken_are_bounded() -> None:
    state = state_at(ManualClock())
    assert state.call_failed(LOST) is not None
    assert state.call_failed(LOST) is None
    assert state.is_over and "(2 attempts)" in str(failure_of(state))


def test_a_server_that_answered_before_is_waited_for_before_a_request_is_taken() -> None:
    server, clock = ServerState("host:1"), ManualClock()
    first, second = (
        StreamState(make_request(PromptInput("Once"), None, {}), server, RECONNECT, clock) for _ in range(2)
    )
    first.accept(started())
    delays = [second.call_failed(LOST) for _ in range(4)]
    assert None not in delays[:3] and delays[3] is None
    assert second.output().num_resumes == 0  # it is asked again, not resumed


@pytest.mark.parametrize(("said", "known"), [((True,), True), ((True, False), False), ((False, True), False)])
def test_an_output_is_exact_if_all_servers_that_it_came_from_were(said: tuple[bool, ...], known: bool) -> None:
    state = state_at(ManualClock())
    for exact in said:
        state.accept(started(exact=exact))
    assert state.output().exact is known


def test_a_stream_that_began_exact_is_resumed_exactly() -> None:
    state = state_at(ManualClock())
    assert not state.next_request().exact
    state.accept(started(exact=True))
    assert state.next_request().exact


def test_attempts_to_resume_are_bounded() -> None:
    state = started_at(ManualClock())
    delays = [state.call_failed(LOST) for _ in range(4)]
    assert None not in delays[:3] and delays[3] is None
    assert state.output().num_resumes == 3


@pytest.mark.parametrize("state_of", [state_at, started_at])
def test_a_request_that_drained_groups_end_is_not_sent_again(state_of: Callable[[ManualClock], StreamState]) -> None:
    state = state_of(ManualClock())
    assert state.call_failed(DrainedError("undo the drain")) is None
    assert isinstance(failure := failure_of(state), DrainedError) and str(failure) == "undo the drain"


def test_full_server_is_left_alone_as_long_as_it_asks() -> None:
    assert started_at(ManualClock()).call_failed(ResourceExhaustedError("full", 30.0)) == 30.0


def test_request_that_was_not_taken_is_refused_by_a_full_server() -> None:
    state = state_at(ManualClock())
    assert state.call_failed(ResourceExhaustedError("full", 30.0)) is None
    assert isinstance(failure_of(state), ResourceExhaustedError)


def test_resumed_request_has_the_time_that_is_left() -> None:
    clock = ManualClock()
    state = started_at(clock, deadline_s=10.0)
    assert (state.next_request().deadline_ms, state.timeout_s()) == (10_000, 10.0 + DEADLINE_GRACE_S)
    clock.advance(4.0)
    assert (state.next_request().deadline_ms, state.timeout_s()) == (6_000, 6.0 + DEADLINE_GRACE_S)


def test_deadline_passes_while_the_server_is_away() -> None:
    clock = ManualClock()
    state = started_at(clock, deadline_s=10.0)
    clock.advance(9.9)
    assert state.call_failed(LOST) is None
    assert isinstance(failure_of(state), DeadlineExceededError)


def test_no_deadline_is_no_deadline() -> None:
    state = state_at(ManualClock())
    assert (state.next_request().deadline_ms, state.timeout_s()) == (0, None)


def test_news_of_a_newer_server_are_passed_over() -> None:
    assert started_at(ManualClock()).accept(orchestrator_pb2.GenerateEvent()) is None


def test_end_of_a_request_whose_choices_have_not_ended_is_refused() -> None:
    message = orchestrator_pb2.GenerateEvent(finished=orchestrator_pb2.Finished())
    with pytest.raises(BatonError, match="choices have not all ended"):
        started_at(ManualClock()).accept(message)


def token(
    choice: int,
    index: int,
    end: bool = False,
    reason: generate_pb2.FinishReason.ValueType = generate_pb2.FINISH_REASON_STOP,
) -> orchestrator_pb2.GenerateEvent:
    finish = reason if end else generate_pb2.FINISH_REASON_UNSPECIFIED
    sampled = common_pb2.SampledToken(token_id=100 * choice + index)
    event = generate_pb2.TokenEvent(index=index, token=sampled, text=f"{choice}{index} ", finish=finish, choice=choice)
    return orchestrator_pb2.GenerateEvent(token=event)


def several(n: int) -> StreamState:
    request = make_request(
        PromptInput("Once"), None, {"n": n, "seed": 3}, fields=orchestrator_pb2.GenerateRequest(request_id="r")
    )
    state = StreamState(request, ServerState("host:1"), RECONNECT, ManualClock())
    state.accept(started(seed=3))
    return state


def test_choices_are_told_apart_and_resumed_each_after_its_tokens() -> None:
    state = several(3)
    for message in (token(0, 0), token(2, 0), token(2, 1, end=True)):
        state.accept(message)
    assert [choice.text for choice in state.output().choices] == ["00 ", "", "20 21 "]
    assert [choice.finish for choice in state.output().choices] == [None, None, FinishReason.STOP]
    assert state.call_failed(LOST) is not None
    assert [list(output.token_ids) for output in state.next_request().outputs] == [[0], [], [200, 201]]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (generate_pb2.FINISH_REASON_DEADLINE, DeadlineExceededError),
        (generate_pb2.FINISH_REASON_CANCELLED, RequestCancelledError),
        (generate_pb2.FINISH_REASON_ERROR, BatonError),
    ],
)
def test_a_lost_goodbye_hides_no_failure(reason: generate_pb2.FinishReason.ValueType, kind: type[BatonError]) -> None:
    state = several(2)
    state.accept(token(0, 0, end=True))
    state.accept(token(1, 0, end=True, reason=reason))
    assert state.call_failed(LOST) is None
    assert state.is_over and type(failure_of(state)) is kind
    assert len(state.output().choices[1].tokens) == 1


def test_a_lost_goodbye_of_a_complete_request_is_no_failure() -> None:
    state = several(1)
    state.accept(token(0, 0, end=True))
    assert state.call_failed(LOST) is None
    state.raise_failure()
    assert state.is_over


def test_an_end_that_comes_again_is_shown_once() -> None:
    state = several(2)
    state.accept(token(0, 0, end=True))
    assert state.accept(token(0, 0, end=True)) is None
    assert len(state.output().tokens) == 1


def test_an_end_that_comes_with_a_known_token_is_taken_without_it() -> None:
    state = several(2)
    state.accept(token(0, 0))
    event = state.accept(token(0, 0, end=True))
    assert event is not None and (event.token, event.text, event.finish) == (None, "", FinishReason.STOP)
    assert state.output().text == "00 "


def test_a_choice_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(BatonError, match="sent choice 2 of 2"):
        several(2).accept(token(2, 0))


def test_first_failure_stays() -> None:
    state = started_at(ManualClock())
    state.fail(BatonError("first"))
    state.fail(BatonError("second"))
    assert str(failure_of(state)) == "first"
