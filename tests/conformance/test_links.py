"""One suite for every implementation of `prefill_workers.links.Links`: in-process, gloo, gloo with communicators."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import LinkBrokenError
from baton.types import Epoch, JobId, Rank, TokenRange
from prefill_workers.links import LinkHeader, Links, LinkStatus
from tests.support.links.link_groups import Recorder, communicator_group, in_process_group, torch_group

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0

Group = tuple[list[Links], list[Recorder]]
Connect = Callable[[int], Group]


@pytest.fixture(
    params=[in_process_group, torch_group, communicator_group], ids=["in_process", "torch", "communicators"]
)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    made: list[Links] = []

    def make(num_ranks: int) -> Group:
        links, recorders = request.param(num_ranks)
        made.extend(links)
        return links, recorders

    yield make
    for links in made:
        links.close()
    assert all(links.wait_closed(TIMEOUT_S) for links in made), "a link thread is left"


def data(job: int, layer: int, num_bytes: int) -> LinkHeader:
    return LinkHeader(Epoch(1), JobId(job), layer, TokenRange(0, num_bytes), LinkStatus.DATA, num_bytes)


def abort(job: int) -> LinkHeader:
    return LinkHeader.bare(Epoch(1), JobId(job), LinkStatus.ABORT)


def pattern(seed: int, num_bytes: int) -> bytearray:
    return bytearray((seed * 31 + i) % 251 for i in range(num_bytes))


def test_message_arrives_whole_with_its_header(connect: Connect) -> None:
    links, recorders = connect(2)
    payload = pattern(1, 1000)
    links[0].send(Rank(1), data(7, 3, 1000), memoryview(payload))
    (message,) = recorders[1].wait_received(1)
    assert message == (Rank(0), data(7, 3, 1000), bytes(payload))


def test_payload_is_received_in_the_place_given(connect: Connect) -> None:
    links, recorders = connect(2)
    memory = bytearray(64)
    recorders[1].places[JobId(1)] = memoryview(memory)[16:48]
    links[0].send(Rank(1), data(1, 0, 32), memoryview(bytearray(b"x" * 32)))
    recorders[1].wait_received(1)
    assert memory == bytes(16) + b"x" * 32 + bytes(16)


def test_messages_to_one_target_stay_in_order(connect: Connect) -> None:
    links, recorders = connect(2)
    headers = [abort(n) if n % 3 == 0 else data(n, n, 1 + n * 37 % 500) for n in range(200)]
    for header in headers:
        payload = memoryview(pattern(header.job, header.num_bytes)) if header.num_bytes else None
        links[0].send(Rank(1), header, payload)
    received = recorders[1].wait_received(200)
    assert [header for _, header, _ in received] == headers
    assert all(payload == bytes(pattern(header.job, header.num_bytes)) for _, header, payload in received)


def test_bare_header_asks_for_no_place(connect: Connect) -> None:
    links, recorders = connect(2)
    links[0].send(Rank(1), abort(1), None)
    recorders[1].wait_received(1)
    assert recorders[1].num_places_asked == 0


def test_unwanted_payload_is_dropped_and_the_link_stays_in_step(connect: Connect) -> None:
    links, recorders = connect(2)
    recorders[1].unwanted.add(JobId(1))
    links[0].send(Rank(1), data(1, 0, 5000), memoryview(bytearray(5000)))
    links[0].send(Rank(1), data(2, 0, 9), memoryview(bytearray(b"123456789")))
    received = recorders[1].wait_received(2)
    assert [payload for _, _, payload in received] == [b"", b"123456789"]


def test_big_payload(connect: Connect) -> None:
    links, recorders = connect(2)
    payload = bytearray(range(256)) * (16 * 4096)
    links[0].send(Rank(1), data(1, 0, len(payload)), memoryview(payload))
    ((_, _, received),) = recorders[1].wait_received(1)
    assert received == payload


def test_all_pairs_at_the_same_time_in_both_directions(connect: Connect) -> None:
    num_ranks, num_messages = 3, 30
    links, recorders = connect(num_ranks)

    def send_all(rank: int) -> None:
        for n in range(num_messages):
            for target in range(num_ranks):
                if target != rank:
                    links[rank].send(Rank(target), data(n, rank, 2000), memoryview(pattern(rank, 2000)))

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(send_all, range(num_ranks)))
    for rank in range(num_ranks):
        received = recorders[rank].wait_received(num_messages * (num_ranks - 1))
        for source in set(range(num_ranks)) - {rank}:
            jobs = [header.job for sender, header, _ in received if sender == source]
            assert jobs == list(range(num_messages))
        assert all(payload == bytes(pattern(source, 2000)) for source, _, payload in received)


def test_concurrent_senders_to_one_target_do_not_mix_messages(connect: Connect) -> None:
    links, recorders = connect(2)

    def send_job(job: int) -> None:
        for layer in range(25):
            links[0].send(Rank(1), data(job, layer, 100 + job), memoryview(pattern(job, 100 + job)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send_job, range(4)))
    received = recorders[1].wait_received(100)
    for job in range(4):
        assert [header.layer for _, header, _ in received if header.job == job] == list(range(25))
    assert all(payload == bytes(pattern(header.job, header.num_bytes)) for _, header, payload in received)


def test_sent_is_reported_only_when_the_receiver_had_a_place(connect: Connect) -> None:
    links, recorders = connect(2)
    recorders[1].gate.clear()
    payload = bytearray(b"before")
    links[0].send(Rank(1), data(1, 0, 6), memoryview(payload))
    assert recorders[1].asked.wait(TIMEOUT_S)
    assert recorders[0].sent_messages == []
    recorders[1].gate.set()
    assert recorders[0].wait_sent(1) == [(Rank(1), data(1, 0, 6))]


def test_send_does_not_wait_for_a_slow_receiver(connect: Connect) -> None:
    links, recorders = connect(2)
    recorders[1].gate.clear()
    for n in range(50):
        links[0].send(Rank(1), data(n, 0, 100_000), memoryview(bytearray(100_000)))
    recorders[1].gate.set()
    assert len(recorders[1].wait_received(50)) == 50


def test_slow_receiver_holds_up_its_own_link_only(connect: Connect) -> None:
    links, recorders = connect(3)
    recorders[2].gate.clear()
    links[0].send(Rank(2), data(1, 0, 100_000), memoryview(bytearray(100_000)))
    links[0].send(Rank(1), data(2, 0, 100_000), memoryview(bytearray(100_000)))
    recorders[1].wait_received(1)
    links[1].send(Rank(2), abort(3), None)
    recorders[2].wait_received(1)
    recorders[2].gate.set()
    recorders[2].wait_received(2)


def test_close_breaks_every_peer_and_not_oneself(connect: Connect) -> None:
    links, recorders = connect(3)
    links[1].close()
    for peer in (0, 2):
        assert isinstance(recorders[peer].wait_broken(), LinkBrokenError)
    assert recorders[1].errors == []


def test_error_of_a_closed_link_is_retryable_and_names_the_peer(connect: Connect) -> None:
    links, recorders = connect(2)
    links[0].close()
    error = recorders[1].wait_broken()
    assert error.retryable
    assert "0" in str(error)


def test_send_after_close_is_dropped(connect: Connect) -> None:
    links, recorders = connect(2)
    links[0].close()
    links[0].send(Rank(1), abort(1), None)
    recorders[1].wait_broken()
    links[1].close()
    assert links[0].wait_closed(TIMEOUT_S)
    assert recorders[1].received_messages == []


def test_close_drops_what_waits_and_ends_all_threads(connect: Connect) -> None:
    links, recorders = connect(2)
    recorders[1].gate.clear()
    for n in range(20):
        links[0].send(Rank(1), data(n, 0, 50_000), memoryview(bytearray(50_000)))
    assert recorders[1].asked.wait(TIMEOUT_S)
    links[0].close()
    recorders[1].gate.set()
    recorders[1].wait_broken()
    links[1].close()
    assert links[0].wait_closed(TIMEOUT_S)
    assert links[1].wait_closed(TIMEOUT_S)
    assert len(recorders[1].received_messages) <= 1


def test_close_while_the_peer_sends_leaves_nobody_hanging(connect: Connect) -> None:
    links, recorders = connect(2)
    for n in range(50):
        links[0].send(Rank(1), data(n, 0, 20_000), memoryview(bytearray(20_000)))
    links[1].close()
    recorders[0].wait_broken()
    links[0].close()
    assert links[0].wait_closed(TIMEOUT_S)


def test_close_may_be_called_again_and_from_several_threads(connect: Connect) -> None:
    links, _ = connect(2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: links[n % 2].close(), range(8)))
    assert links[0].wait_closed(TIMEOUT_S)


def test_payload_is_released_once_sent(connect: Connect) -> None:
    links, recorders = connect(2)
    payload = bytearray(1000)
    links[0].send(Rank(1), data(1, 0, 1000), memoryview(payload))
    recorders[0].wait_sent(1)
    payload.extend(b"!")  # raises BufferError while anyone holds a view


def test_one_rank_alone_has_no_links(connect: Connect) -> None:
    links, recorders = connect(1)
    links[0].close()
    assert links[0].wait_closed(0.0)
    assert recorders[0].errors == []


@pytest.mark.parametrize(
    "make", [in_process_group, torch_group, communicator_group], ids=["in_process", "torch", "communicators"]
)
def test_ranks_that_do_not_meet_fail_in_time(make: Callable[..., Group]) -> None:
    with pytest.raises(LinkBrokenError, match="met not all 2 ranks"):
        make(2, absent=Rank(1), timeout_s=0.3)


def test_two_epochs_do_not_meet(connect: Connect) -> None:
    first, first_recorders = connect(2)
    second, second_recorders = connect(2)
    first[0].send(Rank(1), abort(1), None)
    second[0].send(Rank(1), abort(2), None)
    assert first_recorders[1].wait_received(1)[0][1].job == 1
    assert second_recorders[1].wait_received(1)[0][1].job == 2
    first[0].close()
    first_recorders[1].wait_broken()
    assert second_recorders[1].errors == []


def test_header_survives_the_wire(connect: Connect) -> None:
    header = LinkHeader(Epoch(2**40), JobId(2**50), 131, TokenRange(5, 2**33), LinkStatus.ALIVE, 0)
    links, recorders = connect(2)
    links[0].send(Rank(1), header, None)
    assert recorders[1].wait_received(1)[0][1] == header
