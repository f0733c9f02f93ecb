"""Staging frames: who gets them, who waits, and that a link copies from them without another copy."""

from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from baton.modeling.device.copying import LinkAccess, ThreadLink
from baton.modeling.kv.staging import Frame, StagingFrames


def home(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def frames() -> StagingFrames:
    return StagingFrames(home, num_frames=3, frame_bytes=8)


def test_frames_are_apart_and_there_are_no_more_than_were_made(frames: StagingFrames) -> None:
    taken = frames.take(3).result(0)
    for value, frame in enumerate(taken):
        frame[:] = bytes([value + 1] * 8)
    assert [bytes(frame) for frame in taken] == [bytes([value + 1] * 8) for value in range(3)]
    assert not frames.take(1).done()


def test_the_frame_that_came_back_last_is_taken_first(frames: StagingFrames) -> None:
    first, second = frames.take(2).result(0)
    frames.give([second])
    frames.give([first])
    [again] = frames.take(1).result(0)
    again[:] = b"again---"
    assert bytes(first) == b"again---"


def test_waiters_get_frames_in_order_and_are_not_overtaken(frames: StagingFrames) -> None:
    taken = frames.take(3).result(0)
    two, one = frames.take(2), frames.take(1)
    frames.give(taken[:1])
    assert (two.done(), one.done(), frames.num_free) == (False, False, 1)
    assert not frames.take(1).done()
    frames.give(taken[1:])
    assert (two.done(), one.done(), frames.num_free) == (True, True, 0)


def test_a_wait_that_was_cancelled_takes_no_frame(frames: StagingFrames) -> None:
    taken = frames.take(3).result(0)
    asked: Future[list[Frame]] = frames.take(3)
    assert asked.cancel()
    frames.give(taken)
    assert frames.num_free == 3


def test_a_link_copies_straight_from_frames_and_other_bytes_through_memory_of_its_own() -> None:
    made, sources = list[int](), list[int]()

    def counted(num_bytes: int) -> Tensor:
        made.append(num_bytes)
        return home(num_bytes)

    def noted(to: Tensor, source: Tensor) -> None:
        sources.append(source.data_ptr())
        to.copy_(source)

    link = ThreadLink(noted)
    access = LinkAccess(link, counted, num_frames=2, frame_bytes=64)
    there = torch.zeros(2, 4)
    [frame] = access.frames.take(1).result(0)
    frame[16:32] = torch.arange(4.0).numpy().data.cast("B")
    access.write([([there[1]], frame[16:32])], after=None).result()
    assert there.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert (made, sources) == ([128], [torch.frombuffer(frame, dtype=torch.uint8).data_ptr() + 16])
    access.write([([there[0]], torch.ones(4).numpy().data.cast("B").toreadonly())], after=None).result()
    assert (there[0].tolist(), made) == ([1, 1, 1, 1], [128, 16])
    link.rest()
