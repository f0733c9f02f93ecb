"""A job says consistently who computes what."""

import math

import pytest

from baton.errors import InvalidArgumentError
from baton.modeling.kv.buffers import KvBuffer
from baton.types import Epoch, JobId, KvLayout, Rank, RequestId, TokenRange
from prefill_workers.job import Job

LAYOUT = KvLayout("model", 1, 1, 2, "float32")


def make(
    ranks: tuple[int, ...] = (0, 1),
    chunks: tuple[tuple[int, int], ...] = ((0, 3), (3, 5)),
    num_prompt: int = 4,
    num_output: int = 1,
    prefix: tuple[KvBuffer, ...] = (),
    *,
    due_s: float = 0.0,
    layer_s: float = 0.0,
) -> Job:
    return Job(
        JobId(1),
        Epoch(1),
        RequestId("r"),
        1,
        tuple(Rank(rank) for rank in ranks),
        tuple(TokenRange(*chunk) for chunk in chunks),
        range(num_prompt),
        range(100, 100 + num_output),
        prefix=prefix,
        due_s=due_s,
        layer_s=layer_s,
    )


def test_prompt_is_prompt_then_output() -> None:
    assert make().token_ids == [0, 1, 2, 3, 100]


def test_nothing_is_cached_without_a_prefix() -> None:
    assert make().cached == TokenRange(0, 0)


def kv(start: int, end: int) -> KvBuffer:
    return KvBuffer(LAYOUT, TokenRange(start, end))


def test_what_lies_before_the_first_chunk_is_cached() -> None:
    held = kv(0, 1), kv(1, 3), kv(3, 4)
    job = make(chunks=((2, 3), (3, 5)), prefix=held)
    assert job.cached == TokenRange(0, 2)
    assert job.cached_pieces == [(held[0], TokenRange(0, 1)), (held[1], TokenRange(1, 2))]
    assert make().cached_pieces == []


@pytest.mark.parametrize("ranks", [(), (1, 0), (0, 0), (0, 1, 2), (0,)])
def test_ranks_are_ascending_and_as_many_as_chunks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="job 1: (ranks|chunks)"):
        make(ranks=ranks)


@pytest.mark.parametrize(
    "chunks",
    [((0, 3), (4, 5)), ((0, 3), (2, 5)), ((0, 3), (3, 4)), ((0, 3), (3, 6)), ((0, 5), (5, 5)), ((1, 3), (3, 5))],
)
def test_chunks_cover_the_prompt(chunks: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="job 1: chunks"):
        make(chunks=chunks)


@pytest.mark.parametrize("held", [[(0, 1)], [(1, 3)], [(0, 1), (2, 3)], [(1, 3), (0, 1)], []])
def test_prefix_must_hold_all_that_is_cached(held: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidArgumentError, match="cached tokens"):
        make(chunks=((2, 3), (3, 5)), prefix=tuple(kv(*each) for each in held))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_job_is_due_at_a_time(value: float) -> None:
    with pytest.raises(InvalidArgumentError, match="job 1: due_s"):
        make(due_s=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_layer_takes_a_time(value: float) -> None:
    with pytest.raises(InvalidArgumentError, match="job 1: layer_s"):
        make(layer_s=value)
