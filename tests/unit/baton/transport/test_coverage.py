import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import RangeError
from baton.transport.coverage import Coverage
from baton.types import TokenRange


def test_nothing_is_complete_at_first() -> None:
    assert not Coverage(2, 4).complete


def test_coverage_of_no_tokens_is_complete() -> None:
    coverage = Coverage(2, 0)
    assert coverage.complete
    assert coverage.first_missing() is None


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_disjoint_pieces_in_any_order_complete_it(
    num_layers: int, num_tokens: int, max_tokens: int, order: random.Random
) -> None:
    coverage = Coverage(num_layers, num_tokens)
    pieces = [(layer, part) for layer in range(num_layers) for part in TokenRange(0, num_tokens).split(max_tokens)]
    order.shuffle(pieces)
    for index, (layer, part) in enumerate(pieces):
        assert not coverage.complete, index
        assert coverage.add(layer, part) is True
    assert coverage.complete
    assert coverage.first_missing() is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=12))
def test_agrees_with_a_set_of_tokens(bounds: list[list[int]]) -> None:
    coverage = Coverage(1, 10)
    pieces: set[tuple[int, int]] = set()
    tokens: set[int] = set()
    for start, end in bounds:
        new = set(range(start, end))
        if (start, end) in pieces:
            assert coverage.add(0, TokenRange(start, end)) is False
        elif not new or end > 10 or new & tokens:
            with pytest.raises(RangeError):
                coverage.add(0, TokenRange(start, end))
        else:
            assert coverage.add(0, TokenRange(start, end)) is True
            pieces.add((start, end))
            tokens |= new
    missing = coverage.first_missing()
    first = next((token for token in range(10) if token not in tokens), None)
    assert (None if missing is None else missing[1].start) == first
    assert coverage.complete == (first is None)


def test_equal_piece_is_a_duplicate() -> None:
    coverage = Coverage(1, 8)
    coverage.add(0, TokenRange(2, 5))
    assert coverage.add(0, TokenRange(2, 5)) is False


def test_same_range_of_another_layer_is_new() -> None:
    coverage = Coverage(2, 8)
    coverage.add(0, TokenRange(2, 5))
    assert coverage.add(1, TokenRange(2, 5)) is True


@pytest.mark.parametrize("bounds", [(1, 3), (4, 6), (3, 4), (0, 8), (2, 6), (1, 5)])
def test_partial_overlap_is_refused(bounds: tuple[int, int]) -> None:
    coverage = Coverage(1, 8)
    coverage.add(0, TokenRange(2, 5))
    with pytest.raises(RangeError, match=r"overlap the earlier piece \[2, 5\)"):
        coverage.add(0, TokenRange(*bounds))


def test_refused_piece_is_not_noted() -> None:
    coverage = Coverage(1, 8)
    coverage.add(0, TokenRange(2, 5))
    with pytest.raises(RangeError):
        coverage.add(0, TokenRange(4, 8))
    assert coverage.add(0, TokenRange(5, 8)) is True


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(RangeError, match=f"layer {layer}"):
        Coverage(2, 8).add(layer, TokenRange(0, 4))


def test_first_missing_is_the_first_gap_of_the_first_layer_with_one() -> None:
    coverage = Coverage(3, 8)
    coverage.add(0, TokenRange(0, 8))
    coverage.add(1, TokenRange(0, 2))
    coverage.add(1, TokenRange(5, 8))
    assert coverage.first_missing() == (1, TokenRange(2, 5))
