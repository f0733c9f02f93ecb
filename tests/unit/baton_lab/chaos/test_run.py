"""What a run sees, and what it says did not hold."""

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from baton.calls.cluster_state import ClusterState, GenerationStatus, GroupState
from baton.calls.streams import AsyncStream
from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidArgumentError,
    LeaseError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, SampledToken, TokenEvent
from baton_lab.chaos.report import Outcome, outcome_of
from baton_lab.chaos.run import Watch, holdings
from baton_lab.chaos.schedule import Ask, Leave

ASK = Ask(0, stem=0, num_prompt_tokens=4, vocab_size=50, params=SamplingParams(max_tokens=3, n=2))
HASTY = replace(ASK, deadline_s=1.0)
LEAVING = replace(ASK, leave=Leave(2, 0.0))
IDLE = GenerationStatus(num_slots=4, num_free=4)
GROUP = GroupState("generate-0", "generate", ("127.0.0.1:1",), 0, True, 0, 0, generation=IDLE)
EMPTY = ClusterState((GROUP,), 0, 0, 0, "v")


class Stream:
    """Hears whether it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def event(index: int, choice: int = 0, *, finish: FinishReason | None = None, token: bool = True) -> TokenEvent:
    return TokenEvent(index, SampledToken(1) if token else None, "", 0, finish, choice=choice)


def watch(ask: Ask = ASK, stream: Stream | None = None) -> Watch:
    return Watch(cast(AsyncStream, stream or Stream()), ask)


def test_a_whole_stream_is_nothing_to_complain_about() -> None:
    seen = watch()
    ends = event(2, finish=FinishReason.LENGTH), event(1, 1, finish=FinishReason.STOP, token=False)
    for each in (event(0), event(1), event(0, 1), *ends):
        seen.take(each)
    assert (seen.num_running, seen.complaints) == (0, [])


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event(0), event(2)], "choice 0: token 2 after 0"),
        ([event(0), event(0)], "choice 0: token 0 after 0"),
        ([event(0, finish=FinishReason.LENGTH), event(1)], "choice 0: an event after the last"),
    ],
)
def test_gaps_repetitions_and_second_ends_are_seen(events: list[TokenEvent], complaint: str) -> None:
    seen = watch()
    for each in events:
        seen.take(each)
    assert seen.complaints == [complaint]


async def test_a_client_leaves_when_it_is_due() -> None:
    stream = Stream()
    seen = watch(LEAVING, stream)
    seen.take(event(0))
    assert not stream.cancelled.is_set()
    seen.take(event(1))
    await asyncio.wait_for(stream.cancelled.wait(), 60)


def test_what_is_held_is_named() -> None:
    assert holdings(EMPTY) == ""
    status = GenerationStatus(num_slots=4, num_free=3, num_bytes_held=64, imbalance="3 and 2 are not 4")
    busy = replace(GROUP, generation=status)
    text = holdings(replace(EMPTY, groups=(busy,), num_queued=2))
    assert text == "2 queued, 1 slots of generate-0, 64 bytes of generate-0, generate-0: 3 and 2 are not 4"


@pytest.mark.parametrize(
    ("error", "ask", "outcome"),
    [
        (RequestCancelledError("x"), LEAVING, Outcome.LEFT),
        (RequestCancelledError("x"), ASK, Outcome.WRONG),
        (DeadlineExceededError("x"), HASTY, Outcome.LATE),
        (DeadlineExceededError("x"), ASK, Outcome.WRONG),
        (ResourceExhaustedError("x"), HASTY, Outcome.REFUSED),
        (UnavailableError("x"), ASK, Outcome.FAILED),
        (LeaseError("x"), ASK, Outcome.FAILED),
        (InvalidArgumentError("x"), ASK, Outcome.WRONG),
        (BatonError("x"), LEAVING, Outcome.WRONG),
    ],
)
def test_an_error_is_an_outcome(error: BatonError, ask: Ask, outcome: Outcome) -> None:
    assert outcome_of(error, ask) is outcome
