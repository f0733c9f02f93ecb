"""A row's memory: it grows without moving, counts what the operating system counts, and gives all of it back."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory, TensorMemory
from baton.types import KvLayout, TokenRange
from tests.support.kernels.os_memory import resident_bytes

LAYOUT = KvLayout("test", num_layers=3, num_kv_heads=3, head_dim=20, dtype="float32")
"""480 bytes a token and layer: pages hold eight and a half."""
MAX_TOKENS = 100
HUGE_TOKENS = (2 << 20) // LAYOUT.row_bytes + 1
"""The first number of tokens that fills a huge page."""


def pages(num_tokens: int) -> int:
    return -(-num_tokens * LAYOUT.row_bytes // PAGE_BYTES)


def write(memory: PagedMemory, tokens: TokenRange, layer: int | None = None) -> None:
    memory.commit(tokens, layer)
    layers = range(LAYOUT.num_layers) if layer is None else [layer]
    for each in layers:
        memory.data_LS2GH[each, tokens.start : tokens.end].fill_(1.0)


ACTIONS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, MAX_TOKENS - 1), st.integers(1, 30)),
    st.tuples(st.just("grow"), st.integers(1, 12)),
    st.tuples(st.just("release")),
)


@given(st.lists(ACTIONS, max_size=25))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_counted_is_what_a_simple_model_and_the_operating_system_count(
    actions: list[tuple[object, ...]],
) -> None:
    memory = PagedMemory(LAYOUT, MAX_TOKENS)
    held: set[tuple[int, int]] = set()
    length = 0
    for name, *numbers in actions:
        if name == "release":
            memory.release()
            held, length = set(), 0
            continue
        if name == "push":
            layer, start, count = (int(str(number)) for number in numbers)
            tokens, layers = TokenRange(start, min(start + count, MAX_TOKENS)), [layer]
            write(memory, tokens, layer)
        else:
            tokens = TokenRange(length, min(length + int(str(numbers[0])), MAX_TOKENS))
            layers, length = list(range(LAYOUT.num_layers)), tokens.end
            write(memory, tokens)
        row = LAYOUT.row_bytes
        touched = range(tokens.start * row // PAGE_BYTES, pages(tokens.end))
        held |= {(layer, page) for layer in layers for page in touched}
        assert memory.num_bytes == len(held) * PAGE_BYTES
    assert resident_bytes(memory) == memory.num_bytes


def test_a_row_that_grows_is_never_moved_and_takes_what_it_was_said_to_take() -> None:
    memory = PagedMemory(LAYOUT, MAX_TOKENS)
    for length in range(MAX_TOKENS):
        write(memory, TokenRange(length, length + 1))
        assert memory.num_bytes == memory.bytes_for(length + 1) == 3 * pages(length + 1) * PAGE_BYTES
    assert memory.data_LS2GH.data_ptr() == memory.address
    assert bool((memory.data_LS2GH == 1.0).all())


def test_address_space_is_no_memory() -> None:
    memory = PagedMemory(LAYOUT, 1 << 24)  # 24 GB
    assert (memory.num_bytes, resident_bytes(memory)) == (0, 0)
    write(memory, TokenRange(0, 1))
    assert resident_bytes(memory) == memory.num_bytes == 3 * PAGE_BYTES


def test_released_memory_is_gone_and_reads_as_zeros() -> None:
    memory = PagedMemory(LAYOUT, MAX_TOKENS)
    write(memory, TokenRange(0, MAX_TOKENS))
    memory.release()
    memory.release()
    assert (memory.num_bytes, resident_bytes(memory)) == (0, 0)
    assert not bool(memory.data_LS2GH.any())


def test_pages_of_a_large_piece_are_there_before_it_is_written() -> None:
    memory = PagedMemory(LAYOUT, 1000)
    memory.commit(TokenRange(0, 800), 1)
    assert resident_bytes(memory) == memory.num_bytes == pages(800) * PAGE_BYTES
    assert not bool(memory.data_LS2GH.any())


def test_a_long_prompt_counts_the_same_with_huge_pages() -> None:
    length = 2 * HUGE_TOKENS + 50
    memory = PagedMemory(LAYOUT, 3 * HUGE_TOKENS)
    memory.expect(length)
    for layer in range(LAYOUT.num_layers):
        write(memory, TokenRange(0, length), layer)
    write(memory, TokenRange(length, length + 9))
    assert resident_bytes(memory) == memory.num_bytes == memory.bytes_for(length + 9)


def test_a_short_row_after_a_long_one_takes_no_huge_pages() -> None:
    memory = PagedMemory(LAYOUT, 3 * HUGE_TOKENS)
    memory.expect(2 * HUGE_TOKENS)
    write(memory, TokenRange(0, 2 * HUGE_TOKENS))
    memory.release()
    memory.expect(5)
    write(memory, TokenRange(0, 5))
    assert resident_bytes(memory) == memory.num_bytes == 3 * PAGE_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_lie_in_one_piece_each(dtype: str) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    memory = PagedMemory(layout, MAX_TOKENS)
    assert memory.data_LS2GH.shape == (3, MAX_TOKENS, 2, 3, 20)
    assert all(layer.is_contiguous() for layer in memory.data_LS2GH)
    starts = [layer.data_ptr() for layer in memory.data_LS2GH]
    assert {start % (2 << 20) for start in starts} == {0}


def test_memory_outlives_its_owner_while_a_view_lives() -> None:
    memory = PagedMemory(LAYOUT, MAX_TOKENS)
    write(memory, TokenRange(0, 3))
    view = memory.data_LS2GH[1, :3]
    del memory
    assert bool((view == 1.0).all())


def test_tensors_count_the_worst_case() -> None:
    memory = TensorMemory(LAYOUT, MAX_TOKENS, torch.device("cpu"))
    assert (memory.num_bytes, memory.bytes_for(0)) == (0, 0)
    memory.expect(5)
    memory.commit(TokenRange(0, 5))
    assert memory.num_bytes == memory.bytes_for(5) == MAX_TOKENS * LAYOUT.token_bytes
    assert memory.data_LS2GH.shape == (3, MAX_TOKENS, 2, 3, 20)
    memory.release()
    assert memory.num_bytes == 0
