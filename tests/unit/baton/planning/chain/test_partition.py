"""Partitions cover a prompt exactly, whatever its length."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton.planning.chain.partition_table import Knot, PartitionTable
from baton.types import TokenRange
from baton_lab.study.comparison import even_partition

_SKEWED = tuple(Knot(100, (*(0.01,) * (n - 1), 1 - 0.01 * (n - 1))) for n in range(2, 10))
PARTITIONS: dict[str, Callable[[TokenRange, int], tuple[TokenRange, ...]]] = {
    "even": even_partition,
    "predicted": PartitionTable({len(knot.fractions): (knot,) for knot in _SKEWED}).partition,
}


@given(start=st.integers(0, 50), length=st.integers(1, 500), num_ranks=st.integers(1, 9))
def test_even_chunks_cover_the_range_and_differ_by_at_most_one(start: int, length: int, num_ranks: int) -> None:
    chunks = even_partition(TokenRange(start, start + length), num_ranks)
    assert chunks[0].start == start
    assert chunks[-1].end == start + length
    assert all(left.end == right.start for left, right in itertools.pairwise(chunks))
    sizes = [len(chunk) for chunk in chunks]
    assert len(sizes) == min(num_ranks, length)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize("how", PARTITIONS)
@given(start=st.integers(0, 50), length=st.integers(1, 500), num_ranks=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_any_partition_covers_the_range_with_no_empty_chunk(how: str, start: int, length: int, num_ranks: int) -> None:
    chunks = PARTITIONS[how](TokenRange(start, start + length), num_ranks)
    assert (chunks[0].start, chunks[-1].end) == (start, start + length)
    assert all(left.end == right.start for left, right in itertools.pairwise(chunks))
    assert min(len(chunk) for chunk in chunks) >= 1
    assert len(chunks) == min(num_ranks, length)


@pytest.mark.parametrize("how", PARTITIONS)
@pytest.mark.parametrize(("length", "num_ranks", "name"), [(0, 2, "tokens"), (5, 0, "num_ranks")])
def test_nothing_to_divide_is_refused(how: str, length: int, num_ranks: int, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        PARTITIONS[how](TokenRange(0, length), num_ranks)
