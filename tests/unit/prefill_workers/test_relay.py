"""A layer is passed on exactly when its last row is final, from the memory in which it was received and projected."""

import threading

import pytest

from baton.clock import ManualClock
from baton.errors import ChainError
from baton.ids import Epoch, JobId, Rank, RequestId
from baton.types import KvLayout, TokenRange
from modeling.kv_buffers import KvBuffer
from prefill_workers.job import Job
from prefill_workers.links import LinkHeader, LinkStatus
from prefill_workers.relay import Relay

LAYOUT = KvLayout("model", 2, 1, 2, "float32")
CHUNKS = (TokenRange(3, 5), TokenRange(5, 6), TokenRange(6, 9))
Sent = list[tuple[Rank, LinkHeader, memoryview | None]]


def make(place: int) -> tuple[Relay, KvBuffer, Sent]:
    ranks = (Rank(0), Rank(2), Rank(3))
    prefix = KvBuffer(LAYOUT, TokenRange(0, 3))
    job = Job(JobId(7), Epoch(2), RequestId("r"), 1, ranks, CHUNKS, range(9), prefix=prefix)
    buffer = KvBuffer(LAYOUT, TokenRange(3, CHUNKS[place].end))
    sent: Sent = []
    relay = Relay(
        job, ranks[place], buffer, clock=ManualClock(), lock=threading.Condition(), send=lambda *m: sent.append(m)
    )
    return relay, buffer, sent


def incoming(layer: int, tokens: TokenRange = CHUNKS[0]) -> LinkHeader:
    return LinkHeader(Epoch(2), JobId(7), layer, tokens, LinkStatus.DATA, len(tokens) * LAYOUT.row_bytes)


def test_neighbours_are_those_of_the_job() -> None:
    assert [(make(place)[0].source, make(place)[0].target) for place in range(3)] == [(None, 2), (0, 3), (2, None)]


def test_first_rank_passes_on_what_it_projects() -> None:
    relay, _, sent = make(0)
    relay.projected()
    ((target, header, _),) = sent
    assert (target, header) == (2, incoming(0, TokenRange(3, 5)))


@pytest.mark.parametrize("steps", [("received", "projected"), ("projected", "received")])
def test_middle_rank_passes_on_once_both_are_there(steps: tuple[str, str]) -> None:
    relay, _, sent = make(1)
    getattr(relay, steps[0])()
    assert sent == []
    getattr(relay, steps[1])()
    assert [header for _, header, _ in sent] == [incoming(0, TokenRange(3, 6))]


def test_layers_that_came_early_leave_in_order_as_they_are_projected() -> None:
    relay, _, sent = make(1)
    relay.received()
    relay.received()
    relay.projected()
    relay.projected()
    assert [header.layer for _, header, _ in sent] == [0, 1]


def test_last_rank_passes_nothing_on() -> None:
    relay, _, sent = make(2)
    for _ in range(2):
        relay.received()
        relay.projected()
    assert sent == []
    assert relay.done


def test_what_is_passed_on_is_the_memory_itself() -> None:
    relay, buffer, sent = make(1)
    place = relay.place(Rank(0), incoming(0))
    place[:] = b"\1" * place.nbytes
    buffer.span(0, CHUNKS[1]).fill_(0.0)
    relay.received()
    relay.projected()
    payload = sent[0][2]
    assert payload is not None
    assert bytes(payload) == b"\1" * place.nbytes + bytes(LAYOUT.row_bytes)
    buffer.span(0, CHUNKS[1]).view(-1)[0] = 1.0
    assert bytes(payload) != b"\1" * place.nbytes + bytes(LAYOUT.row_bytes)


def test_done_when_all_has_left() -> None:
    relay, _, sent = make(0)
    relay.projected()
    relay.projected()
    relay.sent(sent[0][1])
    assert not relay.done
    relay.sent(sent[1][1])
    assert relay.done
    assert relay.num_bytes_sent == 2 * 2 * LAYOUT.row_bytes


@pytest.mark.parametrize(
    ("source", "header"),
    [
        (Rank(3), incoming(0)),
        (Rank(0), incoming(1)),
        (Rank(0), incoming(0, TokenRange(3, 6))),
        (Rank(0), incoming(0, TokenRange(0, 5))),
    ],
)
def test_unexpected_message_has_no_place(source: Rank, header: LinkHeader) -> None:
    relay, _, _ = make(1)
    with pytest.raises(ChainError, match="give all ranks the same job"):
        relay.place(source, header)


def test_no_place_beyond_the_last_layer() -> None:
    relay, _, _ = make(1)
    relay.received()
    relay.received()
    with pytest.raises(ChainError):
        relay.place(Rank(0), incoming(2))


def test_abort_is_told_once_and_ends_passing_on() -> None:
    relay, _, sent = make(0)
    relay.projected()
    relay.abort()
    relay.abort()
    relay.projected()
    relay.alive()
    assert [header.status for _, header, _ in sent] == [LinkStatus.DATA, LinkStatus.ABORT]


def test_abort_is_not_told_when_all_was_passed_on() -> None:
    relay, _, sent = make(0)
    relay.projected()
    relay.projected()
    relay.abort()
    assert [header.status for _, header, _ in sent] == [LinkStatus.DATA] * 2


def test_alive_has_no_payload() -> None:
    relay, _, sent = make(0)
    relay.alive()
    assert sent == [(Rank(2), LinkHeader.bare(Epoch(2), JobId(7), LinkStatus.ALIVE), None)]
