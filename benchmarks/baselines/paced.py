"""Simulates slow and noisy links on top of fast ones. The module wraps the chain's link interface and the process group
of the other schemes.

Both wrappers delay each message until a link with the given speed would have delivered it (`pacing`). Then they pass it
to the underlying link, in order. All schemes therefore use equal links. An all-gather on n ranks is executed as n - 1
steps, in each of which every rank sends one delayed message to the next rank. At full speed, messages pass without
delay, and an all-gather is one operation of the underlying process group.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor

from baton.types import Rank
from benchmarks.baselines.pacing import FULL_SPEED, LinkSchedule, Pace
from benchmarks.baselines.schemes import Group, Work
from prefill_workers.links import ConnectLinks, LinkHandler, LinkHeader, Links, Payload

Deliver = Callable[[], None]
"""Function that passes a message to the underlying link. It must not block."""


class _Lane:
    """One direction of one link. A thread delivers the posted messages in order, each at its due time. When the lane is
    closed, it delivers the remaining messages immediately."""

    def __init__(self, pace: Pace, direction: int) -> None:
        self._schedule = LinkSchedule(pace, direction)
        self._posted: SimpleQueue[tuple[float, Deliver] | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lane-{direction}", daemon=True)
        self._thread.start()

    def post(self, num_bytes: int, deliver: Deliver) -> None:
        self._posted.put((self._schedule.delivered_s(time.monotonic(), num_bytes), deliver))

    def close(self) -> None:
        self._closing.set()
        self._posted.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._posted.get()) is not None:
            due_s, deliver = item
            self._closing.wait(max(due_s - time.monotonic(), 0.0))  # the time that the link takes
            deliver()


class Pacer:
    """Delays the messages on all links that start at one rank, as links of the simulated speed would. `set` and `close`
    may be called only while no message is in transit."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pace = FULL_SPEED
        self._lanes: dict[int, _Lane] = {}
        self._posting = threading.Lock()

    @property
    def is_full_speed(self) -> bool:
        """True if messages pass without delay."""
        return self._pace.is_full_speed

    def set(self, pace: Pace) -> None:
        """Change the simulated speed of the links. The random bursts of other traffic start again from the seed of
        `pace`."""
        self.close()
        self._pace = pace

    def post(self, target: int, num_bytes: int, deliver: Deliver) -> None:
        """Call `deliver` when a link with the simulated speed would have delivered `num_bytes` bytes to the rank
        `target`. Thread-safe."""
        if self.is_full_speed:
            deliver()
            return
        with self._posting:
            if target not in self._lanes:
                self._lanes[target] = _Lane(self._pace, direction=self._rank * 1000 + target)
            self._lanes[target].post(num_bytes, deliver)

    def close(self) -> None:
        """Stop the threads of all links. Messages that are still delayed are delivered immediately."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


class PacedLinks:
    """Links whose messages are delayed by a pacer. Implements `prefill_workers.links.Links`."""

    def __init__(self, links: Links, pacer: Pacer) -> None:
        self._links, self._pacer = links, pacer

    @property
    def on_device(self) -> bool:
        """True if the payloads of messages are in the device memory of the ranks."""
        return self._links.on_device

    def send(self, target: Rank, header: LinkHeader, payload: Payload | None) -> None:
        self._pacer.post(target, header.num_bytes, lambda: self._links.send(target, header, payload))

    def close(self) -> None:
        self._links.close()

    def wait_closed(self, timeout_s: float) -> bool:
        return self._links.wait_closed(timeout_s)


def paced(connect: ConnectLinks, pacer: Pacer) -> ConnectLinks:
    """Return a function that connects with `connect` and returns links whose messages are delayed by the pacer."""

    def join(handler: LinkHandler) -> Links:
        return PacedLinks(connect(handler), pacer)

    return join


class _Posted:
    """Handle of a send operation that may not have started yet."""

    def __init__(self) -> None:
        self.begun: Future[Work] = Future()

    def wait(self, timeout: timedelta) -> bool:
        return self.begun.result(timeout.total_seconds()).wait(timeout)


class _Done:
    """Handle of an operation that has already completed. Implements `schemes.Work`."""

    def wait(self, timeout: timedelta) -> bool:
        return True


class PacedGroup:
    """Process group whose messages are delayed by a pacer, as on a slower link. Implements `schemes.Group`."""

    def __init__(self, group: Group, pacer: Pacer, timeout: timedelta) -> None:
        self._group, self._pacer, self._timeout = group, pacer, timeout

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        posted = _Posted()

        def deliver() -> None:
            try:
                posted.begun.set_result(self._group.send(tensors, target, tag))
            except RuntimeError as error:  # raised by gloo, and passed to the waiting thread
                posted.begun.set_exception(error)

        self._pacer.post(target, sum(each.nbytes for each in tensors), deliver)
        return posted

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return self._group.recv(tensors, source, tag)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        if self._pacer.is_full_speed:
            return self._group.allgather(outputs, inputs)
        rank, num_ranks = self.rank(), self.size()
        (parts,), (own,) = outputs, inputs
        parts[rank].copy_(own)
        for step in range(num_ranks - 1):
            coming = self.recv([parts[(rank - step - 1) % num_ranks]], (rank - 1) % num_ranks, 0)
            going = self.send([parts[(rank - step) % num_ranks]], (rank + 1) % num_ranks, 0)
            coming.wait(self._timeout)
            going.wait(self._timeout)
        return _Done()
