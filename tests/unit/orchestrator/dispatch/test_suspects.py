"""Requests that are named in crashes of workers: refused after two, and tried one at a time before."""

import asyncio
from dataclasses import replace

import pytest

from baton.errors import BatonError
from baton.limits import MAX_CRASHES
from baton.process.clock import SystemClock
from baton.process.crash_notes import NUM_WATCHED_TOKENS, fingerprint
from baton.sampling_params import SamplingParams
from baton.types import Epoch, RequestId, SampledToken, TokenEvent
from orchestrator.dispatch import suspects
from orchestrator.dispatch.suspects import Suspects
from orchestrator.membership.members import Membership
from orchestrator.membership.view import ClusterView, EndedWorker, GenerationGroup, Group, PrefillGroup
from orchestrator.requests.record import RequestRecord
from orchestrator.requests.request import Request
from orchestrator.workers.client import Clients
from tests.support.wire.secret import SECRET

pytestmark = pytest.mark.integration

REQUEST = Request(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=9, seed=4, n=2))
CRASHES = tuple(
    EndedWorker(f"h:{number}", (fingerprint("r", (1, 2, 3)).hex(), fingerprint("s", (1, 2, 3)).hex()))
    for number in range(MAX_CRASHES)
)
GENERATION = GenerationGroup("generate-0", "127.0.0.1:1", "f", 4, 99)
CHAIN = PrefillGroup("prefill-0", ("127.0.0.1:2", "127.0.0.1:3"), Epoch(1))
"""Nothing listens at these ports."""


def record_of(request: Request = REQUEST) -> RequestRecord:
    record = RequestRecord.of(request, 1)
    record.admit(SystemClock())
    record.place(SystemClock())
    return record


def take_tokens(record: RequestRecord, num: int) -> list[TokenEvent]:
    """Accept as many tokens of the first choice."""
    start = len(record.choices[0].output_ids)
    events = [TokenEvent(start + more, SampledToken(7), "x", 1) for more in range(num)]
    for event in events:
        record.accept(event)
    return events


@pytest.fixture
def members() -> Membership:
    made = Membership()
    made.update(ClusterView(prefill=(CHAIN,), generation=(GENERATION,)))
    return made


@pytest.fixture
async def found(members: Membership) -> Suspects:
    return Suspects(members, Clients(SECRET))


def tell(members: Membership, *ended: EndedWorker) -> None:
    members.update(replace(members.present, ended=ended))


async def try_once(found: Suspects, record: RequestRecord) -> None:
    async with found.trial(record, lambda event: None):
        pass


async def test_a_request_that_is_named_in_two_crashes_is_refused_in_whatever_form_it_comes(
    members: Membership, found: Suspects
) -> None:
    killed = [EndedWorker(f"k:{number}") for number in range(9)]
    tell(members, *killed, CRASHES[0])
    await try_once(found, record_of())
    tell(members, *killed, *CRASHES)
    resumed = replace(REQUEST, outputs=((7,), (8,)))
    for request in (REQUEST, resumed, resumed.of_choice(1, REQUEST.params.of_choice(1))):
        with pytest.raises(BatonError, match=r"r(/1)? is not retried: two workers ended") as caught:
            await try_once(found, record_of(request))
        assert type(caught.value) is BatonError and not caught.value.retryable
    for other in (replace(REQUEST, request_id=RequestId("q")), replace(REQUEST, prompt_ids=(1, 2))):
        await try_once(found, record_of(other))


async def test_suspects_are_tried_one_at_a_time_until_they_have_their_first_tokens(
    members: Membership, found: Suspects
) -> None:
    tell(members, CRASHES[0])
    first, other = record_of(), record_of(replace(REQUEST, request_id=RequestId("s")))
    seen: list[TokenEvent] = []
    async with found.trial(first, seen.append) as emit:
        waiting = asyncio.create_task(try_once(found, other))
        await try_once(found, record_of(replace(REQUEST, request_id=RequestId("innocent"))))
        num_watched = NUM_WATCHED_TOKENS * len(first.choices)
        for event in take_tokens(first, num_watched - 1):
            emit(event)
        assert not waiting.done()
        for event in take_tokens(first, 2):  # and one more, which frees nothing again
            emit(event)
        await asyncio.wait_for(waiting, 30)
        assert len(seen) == num_watched + 1
    await try_once(found, first)


async def test_a_suspect_that_fails_or_is_cancelled_lets_the_next_be_tried(
    members: Membership, found: Suspects
) -> None:
    tell(members, CRASHES[0])
    waiting: list[asyncio.Task[None]] = []

    async def fail() -> None:
        async with found.trial(record_of(), lambda event: None):
            waiting.append(asyncio.create_task(try_once(found, record_of())))
            await asyncio.sleep(0)
            waiting[0].cancel()
            raise BatonError("broken")

    with pytest.raises(BatonError, match="broken"):
        await fail()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await asyncio.wait_for(try_once(found, record_of()), 30)


@pytest.mark.parametrize("group", [GENERATION, CHAIN], ids=["generation", "prefill"])
async def test_the_next_attempt_waits_until_it_is_told_how_the_worker_ended(
    members: Membership, found: Suspects, monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    monkeypatch.setattr(suspects, "_VERDICT_S", 60.0)
    endpoint = group.endpoint if isinstance(group, GenerationGroup) else group.endpoints[1]
    record = record_of()
    record.blame(group.incarnation)
    judging = asyncio.create_task(found.judge(record, 0))
    tell(members, CRASHES[0])
    await asyncio.sleep(0)
    assert not judging.done()
    tell(members, CRASHES[0], EndedWorker(endpoint))  # it was killed
    await asyncio.wait_for(judging, 30)
    tell(members, CRASHES[0], replace(CRASHES[1], endpoint=endpoint))
    with pytest.raises(BatonError, match="is not retried"):
        await found.judge(record, 0)


async def test_an_attempt_that_had_its_first_tokens_or_blames_no_group_is_followed_at_once(
    found: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "_VERDICT_S", 60.0)
    await asyncio.wait_for(found.judge(record_of(), 0), 30)
    record = record_of()
    take_tokens(record, 2 * NUM_WATCHED_TOKENS)
    record.blame(GENERATION.incarnation)
    await asyncio.wait_for(found.judge(record, 0), 30)
    monkeypatch.setattr(suspects, "_VERDICT_S", 0.01)
    await found.judge(record, 1)  # nobody tells, and it goes on


async def test_a_worker_that_has_been_replaced_is_not_waited_for(
    members: Membership, found: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "_VERDICT_S", 60.0)
    record = record_of()
    record.blame(GENERATION.incarnation)
    members.update(ClusterView(generation=(replace(GENERATION, endpoint="127.0.0.1:4"),)))
    await asyncio.wait_for(found.judge(record, 0), 30)
