"""Who is at a generation group, as the records of requests tell."""

import gc
import weakref

import pytest

from baton.results.prefill_trace import PlacementTerms
from baton.sampling_params import SamplingParams
from baton.types import RequestId, SampledToken, TokenEvent, TokenRange
from orchestrator.placement.generation_load import GenerationLoad
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from orchestrator.requests.states import RequestMove
from tests.support.clusters.planners import linear_planner
from tests.support.manual_clock import ManualClock

NOW_S = 1000.0
TOKENS = TokenRange(0, 3)
PLANNER = linear_planner()
TERMS = PlacementTerms(queue_s=0.0, prefill_s=2.0, steps_s=0.0, transfer_s=0.0, others_s=0.0)


def record(num_choices: int = 1) -> RequestRecord:
    """Admitted, and placed now."""
    made = RequestRecord.of(Request(RequestId("r"), (1, 2, 3), SamplingParams(n=num_choices)), int(NOW_S * 1e9))
    made.admit(ManualClock(NOW_S))
    made.place(ManualClock(NOW_S))
    return made


def token(made: RequestRecord, at_s: float, index: int = 0) -> None:
    """The worker's clock is an hour behind."""
    made.accept(TokenEvent(index, SampledToken(7), "a", int((at_s - 3600) * 1e9), None))
    made.see_token(at_s)


@pytest.fixture
def book() -> GenerationLoad:
    return GenerationLoad()


def test_a_prefill_counts_until_its_token_whatever_the_worker_s_clock_says(book: GenerationLoad) -> None:
    made = record()
    book.place(made, "incarnation", PLANNER, TERMS, tokens=TOKENS, now_s=NOW_S)
    assert book.queue_s("incarnation", NOW_S) == pytest.approx(2.0)
    assert book.queue_s("other", NOW_S) == 0.0
    token(made, NOW_S + 1)
    assert book.queue_s("incarnation", NOW_S + 1) == 0.0
    assert len(book) == 1
    made.advance(RequestMove.FINISH)
    assert len(book) == 0


def test_what_it_took_is_told_once_though_it_was_over_when_somebody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = linear_planner()
    book, made = GenerationLoad(), record()
    told: list[tuple[TokenRange, float]] = []
    monkeypatch.setattr(planner, "observe_local", lambda tokens, seconds: told.append((tokens, seconds)))
    book.place(made, "incarnation", planner, TERMS, tokens=TOKENS, now_s=NOW_S)
    token(made, NOW_S + 3)
    made.advance(RequestMove.FINISH)
    assert [len(book), len(book)] == [0, 0]
    assert told == [(TOKENS, 3.0)]


def test_a_retried_request_is_prefilled_until_it_goes_on(book: GenerationLoad) -> None:
    made = record()
    token(made, NOW_S + 1)
    made.retry()
    made.place(ManualClock(NOW_S + 5))
    book.place(made, "incarnation", PLANNER, TERMS, tokens=TOKENS, now_s=NOW_S + 5)
    assert book.queue_s("incarnation", NOW_S + 5) == pytest.approx(2.0)
    token(made, NOW_S + 6, index=1)
    assert book.queue_s("incarnation", NOW_S + 6) == 0.0


def test_an_attempt_that_is_planned_at_another_group_counts_there_alone(book: GenerationLoad) -> None:
    made = record()
    for incarnation in ("full", "free"):
        book.place(made, incarnation, PLANNER, TERMS, tokens=TOKENS, now_s=NOW_S)
    assert (book.context_tokens("full"), book.queue_s("full", NOW_S)) == (None, 0.0)
    assert (book.context_tokens("free"), len(book)) == (3.0, 1)


def test_attempts_at_groups_of_which_nobody_asks_any_more_are_forgotten(book: GenerationLoad) -> None:
    ended = [record() for _ in range(3)]
    for number, made in enumerate(ended):
        book.place(made, f"gone {number}", PLANNER)
        made.advance(RequestMove.FINISH)
    kept = [weakref.ref(made) for made in ended]
    del ended, made
    others = [record() for _ in range(4)]
    for other in others:
        book.place(other, "here", PLANNER)
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert len(book) == 4
