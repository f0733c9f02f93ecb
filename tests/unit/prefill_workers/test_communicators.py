"""Ranks decide alike whether KV goes between their devices, and a communicator that fails ends its epoch alone."""

import logging
import random
import threading
from concurrent.futures import Future

import pytest
from torch import Tensor
from torch.distributed import Store

from baton.errors import LinkBrokenError
from baton.modeling.device.cpu import CpuDevice
from baton.types import Epoch, JobId, Rank, TokenRange
from prefill_workers import communicators
from prefill_workers.communicators import Communicator, CommunicatorBackend, Offer, backend_of, refusal
from prefill_workers.links import LinkHeader, Links, LinkStatus
from tests.support.engines.chains import ChainGroup, assert_right, random_run
from tests.support.engines.devices import PoisonedDevice, TensorDevice
from tests.support.links.device_communicators import GlooBackend
from tests.support.links.link_groups import Recorder, communicator_connects, communicator_group, meet, torch_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0
CPU = random_decoder(num_layers=3)


def data(num_bytes: int, job: int = 1) -> LinkHeader:
    return LinkHeader(Epoch(1), JobId(job), 0, TokenRange(0, num_bytes), LinkStatus.DATA, num_bytes)


def close(groups: list[Links]) -> None:
    for links in groups:
        links.close()
    assert all(links.wait_closed(TIMEOUT_S) for links in groups), "a link thread is left"


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        ([("nccl 2.27.5", "a"), ("nccl 2.27.5", "b"), ("nccl 2.27.5", "c")], ""),
        ([("nccl 2.27.5", "a"), ("nccl 2.27.5", "b"), ("nccl 2.27.5", "a")], "ranks 0 and 2 share a device"),
        ([("nccl 2.27.5", "a"), ("", "")], "rank 1 has no communicator for device memory"),
        ([("nccl 2.27.5", "a"), ("nccl 2.21.1", "b")], "ranks 0 and 1 have nccl 2.27.5 and nccl 2.21.1"),
    ],
)
def test_kv_goes_between_devices_only_if_all_ranks_have_one_of_their_own(
    offers: list[tuple[str, str]], why: str
) -> None:
    assert refusal([Offer(*offer) for offer in offers]) == why


@pytest.mark.parametrize(
    ("backends", "says"),
    [
        ([GlooBackend("a"), GlooBackend("b"), GlooBackend("c")], "between device memories, by gloo"),
        ([GlooBackend("a"), GlooBackend("b"), GlooBackend("a")], "host memory, by gloo: ranks 0 and 2 share a device"),
        ([GlooBackend("a"), None, GlooBackend("c")], "host memory, by gloo: rank 1 has no communicator"),
    ],
)
def test_all_ranks_decide_alike_and_log_it_in_one_line(
    backends: list[CommunicatorBackend | None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefill_workers.communicators")
    links, recorders = meet(torch_connects(3, backends=backends))
    assert {each.on_device for each in links} == {"between" in says}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all(says in line for line in lines)
    links[0].send(Rank(2), data(5), memoryview(bytearray(b"bytes")))
    assert recorders[2].wait_received(1)[0][2] == b"bytes"
    close(links)


def test_a_cpu_has_no_backend() -> None:
    assert backend_of(CpuDevice()) is None


def test_an_abort_and_signs_of_life_keep_their_place_behind_payloads() -> None:
    links, recorders = communicator_group(2)
    bare = [LinkHeader.bare(Epoch(1), JobId(1), status) for status in (LinkStatus.ALIVE, LinkStatus.ABORT)]
    headers = [data(100_000), bare[0], data(10, job=2), bare[1], data(70_000, job=3)]
    for header in headers:
        payload = memoryview(bytearray([header.job] * header.num_bytes)) if header.num_bytes else None
        links[0].send(Rank(1), header, payload)
    received = recorders[1].wait_received(len(headers))
    assert [header for _, header, _ in received] == headers
    assert all(rows == bytes([header.job] * header.num_bytes) for _, header, rows in received)
    close(links)


class DeafEdge:
    """A communicator to a peer that takes and sends nothing after the greeting: calls block until `abort`."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self._has_greeted = False
        self._aborted = threading.Event()
        self.blocked = threading.Event()

    def empty(self, num_bytes: int) -> Tensor:
        return self._inner.empty(num_bytes)

    def send(self, payload: Tensor) -> None:
        if self._block():
            self._inner.send(payload)

    def receive(self, place: Tensor) -> None:
        if self._block():
            self._inner.receive(place)

    def abort(self) -> None:
        self._aborted.set()

    def _block(self) -> bool:
        """Return whether the call is the greeting."""
        if not self._has_greeted:
            self._has_greeted = True
            return True
        self.blocked.set()
        assert self._aborted.wait(TIMEOUT_S), "nobody aborted the communicator"
        return False


class DeafBackend(GlooBackend):
    """Makes communicators that fall silent."""

    def connect(self, store: Store, place: int, timeout_s: float) -> Communicator:
        self.communicator = DeafEdge(super().connect(store, place, timeout_s))
        return self.communicator


def deaf_pair() -> tuple[list[Links], list[Recorder], list[DeafBackend]]:
    backends = [DeafBackend("a"), DeafBackend("b")]
    links, recorders = meet(torch_connects(2, backends=list(backends)))
    return links, recorders, backends


def test_a_payload_that_does_not_come_holds_up_no_news_of_the_peers_end_and_close_ends_the_wait() -> None:
    links, recorders, backends = deaf_pair()
    links[0].send(Rank(1), data(100), memoryview(bytearray(100)))
    assert backends[0].communicator.blocked.wait(TIMEOUT_S)
    assert backends[1].communicator.blocked.wait(TIMEOUT_S)
    links[0].close()
    assert isinstance(recorders[1].wait_broken(), LinkBrokenError)
    close(links)
    assert recorders[1].received_messages == [], "bytes of a communicator that was aborted"
    assert recorders[0].sent_messages == []


class BrokenEdge(DeafEdge):
    """a communicator whose calls fail after the greeting."""

    def _block(self) -> bool:
        if self._has_greeted:
            raise RuntimeError("NCCL communicator was aborted")
        return super()._block()


class BrokenBackend(GlooBackend):
    """Makes communicators that break."""

    def connect(self, store: Store, place: int, timeout_s: float) -> Communicator:
        return BrokenEdge(super().connect(store, place, timeout_s))


@pytest.mark.parametrize("broken", [0, 1])
def test_an_edge_that_breaks_at_one_end_ends_the_epoch_at_both(broken: int) -> None:
    backends: list[CommunicatorBackend | None] = [DeafBackend("a"), DeafBackend("b")]
    backends[broken] = BrokenBackend("c")
    links, recorders = meet(torch_connects(2, backends=backends))
    links[0].send(Rank(1), data(100), memoryview(bytearray(100)))
    error = recorders[broken].wait_broken()
    assert "link between ranks" in str(error)
    assert "NCCL communicator was aborted" in str(error)
    links[broken].close()
    recorders[1 - broken].wait_broken()
    close(links)


class AbsentBackend(GlooBackend):
    """Makes no communicator before the other end has given up."""

    def __init__(self, device_id: str) -> None:
        super().__init__(device_id)
        self.may_go = threading.Event()

    def connect(self, store: Store, place: int, timeout_s: float) -> Communicator:
        assert self.may_go.wait(TIMEOUT_S)
        return super().connect(store, place, timeout_s)


def test_edges_that_are_not_made_in_time_begin_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    class ImpatientFuture(Future[object]):
        def result(self, timeout: float | None = None) -> object:
            assert timeout == TIMEOUT_S
            return super().result(0.1)

    monkeypatch.setattr(communicators, "Future", ImpatientFuture)
    backends = [AbsentBackend("a"), AbsentBackend("b")]
    connects = torch_connects(2, timeout_s=TIMEOUT_S, backends=list(backends))
    with pytest.raises(
        LinkBrokenError, match=r"met not all 2 ranks .*\(not all communicators by gloo were made within 20 s\)"
    ):
        meet(connects)
    left = [thread for thread in threading.enumerate() if thread.name in ("link-0-meet", "link-1-meet")]
    assert len(left) == 2
    for backend in backends:
        backend.may_go.set()
    for thread in left:
        thread.join(TIMEOUT_S)
    del connects  # the store, where they now meet


@pytest.mark.parametrize("device", [PoisonedDevice, TensorDevice])
def test_a_new_epoch_has_new_edges_and_serves(device: type[PoisonedDevice] | type[TensorDevice]) -> None:
    decoder = random_decoder(num_layers=3, device=device())
    with ChainGroup(decoder, 3, connects=communicator_connects) as group:
        for _ in range(3):
            run = group.prepare([1, 2, 3, 4, 5, 6], [TokenRange(0, 2), TokenRange(2, 3), TokenRange(3, 6)])
            assert_right(group, group.submit(run), CPU, most_error=2e-5)
            group.start_epoch()


def test_jobs_that_are_given_up_leave_the_edges_in_step() -> None:
    rng = random.Random(3)
    decoder = random_decoder(num_layers=3, device=TensorDevice())
    with ChainGroup(decoder, 3, connects=communicator_connects) as group:
        for _ in range(10):
            victim, other = random_run(group, rng), random_run(group, rng)
            group.submit(victim)
            group.submit(other)
            group.engines[rng.choice(victim.job.ranks)].cancel(victim.job.number)
            assert_right(group, other, CPU, most_error=2e-5)
            group.wait_idle()
