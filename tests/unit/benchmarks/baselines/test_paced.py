"""Paced links are links: what is sent arrives whole and in order, only later."""

import time

import pytest

from baton.types import Epoch, JobId, Rank, TokenRange
from benchmarks.baselines.link_probe import medians
from benchmarks.baselines.paced import PacedLinks, Pacer
from benchmarks.baselines.pacing import FULL_SPEED, Pace
from prefill_workers.links import LinkHeader, Links, LinkStatus
from tests.support.links.link_groups import in_process_group


def send(links: Links, job: int, num_bytes: int) -> None:
    header = LinkHeader(Epoch(1), JobId(job), 0, TokenRange(0, 0), LinkStatus.DATA, num_bytes)
    links.send(Rank(1), header, memoryview(bytearray([job] * num_bytes)))


@pytest.mark.parametrize("pace", [FULL_SPEED, Pace(bandwidth=1e6)])
def test_messages_arrive_whole_and_in_order(pace: Pace) -> None:
    links, recorders = in_process_group(2)
    pacer = Pacer(rank=0)
    pacer.set(pace)
    paced = PacedLinks(links[0], pacer)
    for job in range(1, 5):
        send(paced, job, num_bytes=1000 * (5 - job))
    received = recorders[1].wait_received(4)
    assert [payload for _, _, payload in received] == [bytes([job]) * (1000 * (5 - job)) for job in range(1, 5)]
    pacer.close()
    paced.close()
    links[1].close()
    assert paced.wait_closed(60.0) and links[1].wait_closed(60.0)


def test_a_message_is_not_there_before_its_time() -> None:
    links, recorders = in_process_group(2)
    pacer = Pacer(rank=0)
    pacer.set(Pace(bandwidth=1e5))
    start_s = time.monotonic()
    send(PacedLinks(links[0], pacer), 1, num_bytes=10_000)
    recorders[1].wait_received(1)
    assert time.monotonic() - start_s >= 0.1
    pacer.close()
    for each in links:
        each.close()
    assert all(each.wait_closed(60.0) for each in links)


def test_the_median_of_each_size() -> None:
    assert medians(((2.0, 5.0), (1.0, 3.0), (1.0, 9.0), (1.0, 1.0), (2.0, 5.0))) == ((1.0, 3.0), (2.0, 5.0))
