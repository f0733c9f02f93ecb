"""KV memory: where each token's keys and values lie, views that share it, and its bytes."""

import pytest
import torch

from baton.modeling.kv.buffers import BufferSpan, KvBuffer, KvRows, LayerBuffers, byte_view
from baton.types import KvLayout, TokenRange


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout("fingerprint", num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype)


def numbered(tokens: TokenRange, dtype: str = "float32") -> KvBuffer:
    """A buffer whose elements are all different."""
    buffer = KvBuffer(layout(dtype), tokens)
    buffer.data.view(-1).copy_(torch.arange(buffer.data.numel()))
    return buffer


def test_buffer_holds_as_many_bytes_as_the_layout_says() -> None:
    assert KvBuffer(layout(), TokenRange(5, 12)).num_bytes == 7 * layout().token_bytes


def test_span_is_addressed_by_absolute_position() -> None:
    buffer = numbered(TokenRange(5, 12))
    assert torch.equal(buffer.span(1, TokenRange(6, 8)), buffer.data[1, 1:3])


def test_span_shares_the_buffers_memory() -> None:
    buffer = numbered(TokenRange(5, 12))
    buffer.span(2, TokenRange(11, 12)).zero_()
    assert torch.count_nonzero(buffer.data[2, 6]) == 0
    assert torch.count_nonzero(buffer.data[2, 5]) == 16


@pytest.mark.parametrize("tokens", [TokenRange(4, 6), TokenRange(11, 13), TokenRange(0, 20)])
def test_span_outside_the_buffer_is_a_bug(tokens: TokenRange) -> None:
    with pytest.raises(AssertionError, match="outside"):
        KvBuffer(layout(), TokenRange(5, 12)).span(0, tokens)


def test_rows_are_views_of_keys_and_values() -> None:
    buffer = numbered(TokenRange(5, 12))
    rows = buffer.rows(1, TokenRange(7, 10))
    assert (rows.first_position, rows.end_position) == (7, 10)
    assert torch.equal(rows.k_SGH, buffer.data[1, 2:5, 0])
    assert torch.equal(rows.v_SGH, buffer.data[1, 2:5, 1])
    assert rows.k_SGH.data_ptr() == buffer.data[1, 2, 0].data_ptr()


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (7, 9, (7, 9)),
        (0, 100, (5, 12)),
        (-3, 6, (5, 6)),
        (11, 50, (11, 12)),
        (20, 30, None),
        (0, 5, None),
        (9, 8, None),
    ],
)
def test_slice_is_clamped_to_what_is_there(start: int, end: int, expected: tuple[int, int] | None) -> None:
    rows = numbered(TokenRange(5, 12)).rows(0, TokenRange(5, 12))
    part = rows.slice(start, end)
    if expected is None:
        assert part.k_SGH.shape[0] == part.v_SGH.shape[0] == 0
    else:
        assert (part.first_position, part.end_position) == expected
        assert torch.equal(part.k_SGH, rows.k_SGH[expected[0] - 5 : expected[1] - 5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exported_bytes_written_elsewhere_give_the_same_kv(dtype: str) -> None:
    source, target = numbered(TokenRange(0, 8), dtype), KvBuffer(layout(dtype), TokenRange(2, 6))
    for layer in range(3):
        target.write(layer, TokenRange(2, 6), source.export(layer, TokenRange(2, 6)))
    assert torch.equal(target.data, source.data[:, 2:6])


def test_write_touches_its_range_only() -> None:
    buffer = numbered(TokenRange(0, 8))
    before = buffer.data.clone()
    buffer.write(1, TokenRange(3, 5), memoryview(bytes(2 * layout().row_bytes)))
    before[1, 3:5] = 0
    assert torch.equal(buffer.data, before)


def test_write_takes_read_only_memory() -> None:
    buffer = numbered(TokenRange(0, 2))
    data = bytes(range(layout().row_bytes))
    buffer.write(0, TokenRange(1, 2), memoryview(data))
    assert bytes(buffer.export(0, TokenRange(1, 2))) == data


@pytest.mark.parametrize("num_bytes", [0, 1, layout().row_bytes, 3 * layout().row_bytes])
def test_write_of_other_length_is_a_bug(num_bytes: int) -> None:
    buffer = numbered(TokenRange(0, 8))
    with pytest.raises(AssertionError, match=f"{num_bytes} bytes for"):
        buffer.write(0, TokenRange(0, 2), memoryview(bytes(num_bytes)))


def test_export_is_the_memory_itself_on_the_cpu() -> None:
    buffer = numbered(TokenRange(0, 8))
    view = buffer.export(1, TokenRange(3, 5))
    assert view.nbytes == 2 * layout().row_bytes
    assert (view.format, view.ndim) == ("B", 1)
    buffer.span(1, TokenRange(3, 5)).zero_()
    assert bytes(view) == bytes(view.nbytes)


def test_byte_view_is_writable() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    byte_view(tensor)[:] = bytes(4)
    assert torch.equal(tensor, torch.zeros(2, dtype=torch.bfloat16))


def test_byte_view_of_a_strided_tensor_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        byte_view(torch.zeros(4, 4)[:, 1])


def test_buffer_span_owns_its_new_tokens_and_sees_all_before() -> None:
    buffer = numbered(TokenRange(5, 20))
    span = BufferSpan(buffer, TokenRange(9, 12))
    assert torch.equal(span.own(2), buffer.data[2, 4:7])
    (rows,) = span.segments(2)
    assert isinstance(rows, KvRows)
    assert (rows.first_position, rows.end_position) == (5, 12)


def test_layers_take_turns_in_a_buffer_of_fewer() -> None:
    buffer = numbered(TokenRange(0, 8))
    span = BufferSpan(buffer, TokenRange(4, 6))
    assert torch.equal(span.own(5), buffer.data[2, 4:6])
    (rows,) = span.segments(4)
    assert torch.equal(rows.k_SGH, buffer.data[1, :6, 0])


def test_place_says_where_each_layer_s_keys_lie() -> None:
    memory = torch.zeros(3, 40, 2, 2, 4)  # room for more than the buffer's tokens
    buffer = KvBuffer.of(layout(), TokenRange(5, 20), memory[:, :15])
    place = BufferSpan(buffer, TokenRange(9, 12)).place()
    assert (place.address, place.num_layers, place.num_keys) == (memory.data_ptr(), 3, 7)
    assert place.address + 2 * place.layer_bytes == memory[2].data_ptr()


def test_data_of_another_shape_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="for TokenRange"):
        KvBuffer.of(layout(), TokenRange(5, 20), torch.zeros(3, 14, 2, 2, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffer_over_memory_is_that_memory(dtype: str) -> None:
    kv = numbered(TokenRange(0, 4), dtype)
    memory = bytearray(byte_view(kv.data))
    over = KvBuffer.over(layout(dtype), TokenRange(5, 9), memoryview(memory))
    assert torch.equal(over.span(1, TokenRange(6, 8)), kv.span(1, TokenRange(1, 3)))
    over.data.zero_()
    assert bytes(memory) == bytes(len(memory))


def test_buffer_over_memory_holds_it_until_its_last_view_is_gone() -> None:
    memory = bytearray(4 * layout().token_bytes)
    rows = KvBuffer.over(layout(), TokenRange(0, 4), memoryview(memory)).rows(0, TokenRange(0, 1))
    with pytest.raises(BufferError):
        memory.clear()
    del rows
    memory.clear()


def test_memory_of_another_size_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="bytes for"):
        KvBuffer.over(layout(), TokenRange(0, 4), memoryview(bytearray(3 * layout().token_bytes)))


def test_layers_have_memory_of_their_own_until_they_are_released() -> None:
    made: list[KvBuffer] = []

    def make(one_layer: KvLayout, tokens: TokenRange) -> KvBuffer:
        made.append(KvBuffer(one_layer, tokens))
        return made[-1]

    layers = LayerBuffers(layout(), TokenRange(5, 12), make)
    first, second = layers.span(0, TokenRange(5, 12)), layers.span(1, TokenRange(5, 12))
    first.fill_(1.0)
    second.fill_(2.0)
    assert len(made) == 2
    assert bool((layers.rows(0, TokenRange(6, 8)).k_SGH == 1.0).all())
    layers.release(0)
    assert layers.span(2, TokenRange(5, 12)).data_ptr() == first.data_ptr()
    assert bool((layers.span(1, TokenRange(5, 12)) == 2.0).all())
    assert len(made) == 2


def test_layer_has_one_place() -> None:
    layers = LayerBuffers(layout(), TokenRange(5, 12))
    whole = layers.span(7, TokenRange(5, 12))
    assert layers.span(7, TokenRange(6, 12)).data_ptr() == whole[1:].data_ptr()
    assert whole.shape == (7, 2, 2, 4)
