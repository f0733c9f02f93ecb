"""Pages of KV: what rows write is what they read, whoever shares pages with them, and every page is given back."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.kv.pages import PagePool, PageSpan, RowPages
from baton.modeling.kv.pool_memory import MappedPool
from baton.types import KvLayout, TokenRange

LAYOUT = KvLayout("test", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
SIZE = 4
"""Tokens of a page."""
NUM_ROWS, MOST_TOKENS = 4, 24
NUM_PAGES = NUM_ROWS * MOST_TOKENS // SIZE


def make_pool(num_pages: int = NUM_PAGES) -> PagePool:
    return PagePool(MappedPool(LAYOUT, num_pages, SIZE))


def write(row: RowPages, tokens: TokenRange, value: float, num_expected: int = 0) -> None:
    """Writes a value of each token, which says the layer too."""
    row.prepare(tokens, num_expected)
    for layer in range(LAYOUT.num_layers):
        for part, kv_T2GH in row.spans(layer, tokens):
            assert len(part) == len(kv_T2GH)
            kv_T2GH.fill_(value + layer / 2)


def read(row: RowPages, num_tokens: int) -> list[float]:
    """The values of the row's first tokens; both layers agree."""
    layers = []
    for layer in range(LAYOUT.num_layers):
        parts = [kv_T2GH for _, kv_T2GH in row.spans(layer, TokenRange(0, num_tokens))]
        values = torch.cat(parts) - layer / 2 if parts else torch.empty(0, 2, 1, 2)
        assert (values == values[:, :1, :, :1]).all()
        layers.append(values[:, 0, 0, 0].tolist())
    assert layers[0] == layers[1]
    return layers[0]


ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, NUM_ROWS - 1), st.integers(1, 9), st.integers(0, 12)),
    st.tuples(st.just("rewrite"), st.integers(0, NUM_ROWS - 1), st.integers(1, 6), st.just(0)),
    st.tuples(
        st.just("share"), st.integers(0, NUM_ROWS - 1), st.integers(0, NUM_ROWS - 1), st.integers(1, MOST_TOKENS)
    ),
    st.tuples(st.just("release"), st.integers(0, NUM_ROWS - 1), st.just(0), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rows_read_what_they_wrote_whatever_they_share(actions: list[tuple[str, int, int, int]]) -> None:
    pool = make_pool()
    rows = [RowPages(pool, MOST_TOKENS) for _ in range(NUM_ROWS)]
    known: list[list[float]] = [[] for _ in rows]
    value = 0.0
    for action, number, first, second in actions:
        row, value = rows[number], value + 1
        if action == "release":
            row.release()
            known[number] = []
        elif action == "share":
            if known[number] or first == number or not known[first]:
                continue
            row.release()
            shared = min(second, len(known[first]))
            row.share(rows[first].pages_of(TokenRange(0, shared)))
            known[number] = known[first][:shared]
        else:
            start = len(known[number]) if action == "write" else max(len(known[number]) - first, 0)
            tokens = TokenRange(start, min(start + first, MOST_TOKENS))
            write(row, tokens, value, min(second, MOST_TOKENS))
            known[number][start:] = [value] * len(tokens)
        for each, values in zip(rows, known, strict=True):
            assert read(each, len(values)) == values
        owners = Counter(page for each in rows for page in each._pages)
        assert pool._num_owners_P.tolist() == [owners[page] for page in range(NUM_PAGES)]
        assert pool.num_taken <= sum(each.num_bytes for each in rows) // pool.page_bytes
    for each in rows:
        each.release()
        each.release()
    assert pool.num_taken == 0


def test_only_the_last_page_is_copied() -> None:
    pool = make_pool()
    first, second = RowPages(pool, MOST_TOKENS), RowPages(pool, MOST_TOKENS)
    write(first, TokenRange(0, 10), 1.0)
    second.share(first.pages_of(TokenRange(0, 10)))
    assert pool.num_taken == 3
    write(second, TokenRange(10, 11), 2.0)
    assert pool.num_taken == 4
    write(first, TokenRange(10, 11), 3.0)  # nobody shares its last page any more
    assert pool.num_taken == 4
    assert read(second, 11) == [1.0] * 10 + [2.0]
    assert read(first, 11) == [1.0] * 10 + [3.0]


def test_pages_that_are_expected_are_adjacent() -> None:
    pool = make_pool()
    one, other = RowPages(pool, MOST_TOKENS), RowPages(pool, MOST_TOKENS)
    write(one, TokenRange(0, 2), 1.0, num_expected=20)
    write(other, TokenRange(0, 2), 2.0)
    write(one, TokenRange(2, 22), 1.0)
    assert [len(part) for part, _ in one.runs(TokenRange(1, 22))] == [19, 2]
    assert [rows.first_position for rows in PageSpan(one, TokenRange(18, 22)).segments(0)] == [0, 20]
    assert [len(kv_T2GH) for _, kv_T2GH in PageSpan(one, TokenRange(18, 22)).owns(1)] == [2, 2]


def test_too_few_pages_are_an_error_that_takes_none() -> None:
    pool = make_pool(3)
    row, other = RowPages(pool, MOST_TOKENS), RowPages(pool, MOST_TOKENS)
    write(row, TokenRange(0, 8), 1.0)
    with pytest.raises(MemoryError, match="2 pages are needed, and 1 of 3 are free"):
        other.prepare(TokenRange(0, 5), 0)
    assert (pool.num_taken, other.num_bytes) == (2, 0)


def test_pages_count_in_the_arena_and_never_beyond_its_limit() -> None:
    device = EmulatedDevice()
    pool = PagePool(device.pool_memory(LAYOUT, NUM_PAGES, SIZE))
    device.bound(3 * pool.page_bytes)
    row, other = RowPages(pool, MOST_TOKENS), RowPages(pool, MOST_TOKENS)
    row.prepare(TokenRange(0, 12), 0)
    other.share(row.pages_of(TokenRange(0, 12)))
    assert device.memory_use.num_bytes == 3 * pool.page_bytes
    with pytest.raises(MemoryError, match="exceed the device's"):
        other.prepare(TokenRange(11, 12), 0)
    row.release()
    other.prepare(TokenRange(11, 13 - 1), 0)
    other.release()
    assert device.memory_use.num_bytes == 0
    assert device.memory_use.peak_bytes == 3 * pool.page_bytes
    device.require(pool.memory.data_LPS2GH.data_ptr(), 1)
