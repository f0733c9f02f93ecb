"""KV in 4 bits: what a group keeps, by floats of Python; bytes by the formula; steps close to those of full KV."""

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kernels import native
from baton.modeling.kv.buffers import BufferSpan, KvBuffer, byte_view
from baton.types import SlotId, TokenRange
from generate_workers.residency.int4.format import Int4Format, has_int4_kernel
from generate_workers.residency.int4.whole import Int4Residency, make_int4
from generate_workers.residency.port import KvBytes, KvShape
from tests.support.engines.devices import PoisonedMemory
from tests.support.engines.generation import prefilled, prompt
from tests.support.engines.slot_tables import whole_pages
from tests.support.kernels.int4 import HEAD_DIMS, form_of, packed, random_kv, there_and_back
from tests.support.kernels.paths import require, sets
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.skipif(not has_int4_kernel(), reason="needs a C++ compiler")

CPU = CpuDevice()
SLOT, OTHER = SlotId(0), SlotId(1)
MAX_TOKENS = 128
DECODER = random_decoder(num_layers=5, head_dim=64)


def half(value: float) -> float:
    """Rounded to fp16; infinite beyond it."""
    try:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def reference(values: Sequence[float]) -> tuple[list[int], float, float]:
    """`(codes, step, least)` of one group."""
    least = half(min(values))
    step = half(max(max(values) - least, 0.0) / 15)
    if step == 0:
        return [0] * len(values), step, least
    return [min(max(round((value - least) / step), 0), 15) for value in values], step, least


def of_packed(form: Int4Format, packed_W: Tensor) -> tuple[list[int], list[tuple[float, float]]]:
    """`(codes, (step, least) of each group)` of one head's bytes."""
    data = bytes(packed_W.tolist())
    codes = [code for byte in data[: form.plain.head_dim // 2] for code in (byte >> 4, byte & 15)]
    of_groups = struct.unpack(f"{(len(data) - form.plain.head_dim // 2) // 2}e", data[form.plain.head_dim // 2 :])
    return codes, list(zip(of_groups[::2], of_groups[1::2], strict=True))


# What a group keeps.


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_keeps_what_floats_of_python_say(head_dim: int, dtype: str) -> None:
    form = form_of(head_dim, dtype, num_kv_heads=2)
    x_T2GH = random_kv(form, 9)
    back_T2GH = there_and_back(form, x_T2GH)
    for x_H, packed_W, back_H in zip(
        x_T2GH.flatten(0, 2), packed(form, x_T2GH).flatten(0, 2), back_T2GH.flatten(0, 2), strict=True
    ):
        codes, of_groups = of_packed(form, packed_W)
        for number, (step, least) in enumerate(of_groups):
            part = slice(number * form.group, (number + 1) * form.group)
            expected_codes, expected_step, expected_least = reference(x_H[part].tolist())
            assert least == expected_least
            assert step == pytest.approx(expected_step, rel=1e-3)  # fp32 may round to its neighbour
            assert max(abs(a - b) for a, b in zip(codes[part], expected_codes, strict=True)) <= 1  # ties in fp32
            values = torch.tensor([least + code * step for code in codes[part]]).to(x_H.dtype)
            assert back_H[part].tolist() == pytest.approx(values.tolist(), rel=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_error_is_half_a_step_and_what_fp16_rounds(head_dim: int) -> None:
    form = form_of(head_dim)
    x_T2GH = random_kv(form, 200)
    x_T2GMC, back_T2GMC = (each.view(200, 2, 1, -1, form.group) for each in (x_T2GH, there_and_back(form, x_T2GH)))
    error_T2GM = (back_T2GMC - x_T2GMC).abs().amax(-1)
    least_T2GM, most_T2GM = x_T2GMC.aminmax(dim=-1)
    width_T2GM = most_T2GM - least_T2GM
    slack_T2GM = (width_T2GM + least_T2GM.abs()) * 2**-11 + 15 * 2**-25
    assert (error_T2GM <= width_T2GM / 30 + slack_T2GM).all()
    assert error_T2GM.max() > (width_T2GM / 40).max() / 2  # the bound is near


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 6e-8, 1e-30, 65504.0])
def test_a_constant_group_comes_back(value: float) -> None:
    form = form_of(64)
    assert set(there_and_back(form, torch.full((1, 2, 1, 64), value)).flatten().tolist()) == {half(value)}


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-8, 1e-20, 1e-42])
def test_a_group_too_narrow_for_fp16_is_as_right_as_fp16_can_be(scale: float) -> None:
    form = form_of(64)
    x_T2GH = torch.linspace(-1, 1, 128).view(1, 2, 1, 64) * scale
    error = (there_and_back(form, x_T2GH) - x_T2GH).abs().max().item()
    assert error <= scale / 30 + scale * 2**-10 + 16 * 2**-25


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e6, -1e6])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_what_cannot_be_kept_shows_in_its_group_and_nowhere_else(value: float, head_dim: int) -> None:
    form = form_of(head_dim, num_kv_heads=2)
    x_T2GH = random_kv(form, 3)
    x_T2GH[1, 0, 1, 5] = value
    back_T2GH = there_and_back(form, x_T2GH)
    spoilt_T2GH = torch.zeros(back_T2GH.shape, dtype=torch.bool)
    spoilt_T2GH[1, 0, 1, : form.group] = True
    assert torch.equal(back_T2GH.isnan(), spoilt_T2GH)
    assert back_T2GH[~spoilt_T2GH].isfinite().all()


def test_every_byte_of_codes_is_two_values_and_back() -> None:
    """All 256 of them: the levels from 0 to 15 are themselves when least is 0 and a step is 1."""
    form = form_of(64)
    codes_TV = torch.arange(256, dtype=torch.uint8).view(8, 32)
    packed_T2GW = torch.zeros(8, 2, 1, form.head_bytes, dtype=torch.uint8)
    packed_T2GW[..., :32] = codes_TV[:, None, None]
    packed_T2GW[..., 32:] = torch.tensor([1.0, 0.0], dtype=torch.float16).view(torch.uint8)
    plain_T2GH = torch.empty(8, 2, 1, 64)
    form.unpack(packed_T2GW, plain_T2GH)
    assert plain_T2GH[:, 0].flatten().tolist() == [each for byte in range(256) for each in (byte >> 4, byte & 15)]
    full_T2GH = plain_T2GH.clone()
    full_T2GH[..., 0], full_T2GH[..., 1] = 0, 15  # so that each group has all its levels
    back = packed(form, full_T2GH)
    assert torch.equal(back[..., 1:], packed_T2GW[..., 1:])
    assert set(back[..., 0].flatten().tolist()) == {0x0F}


@pytest.mark.parametrize(("head_dim", "group", "bits"), [(64, 64, 4.5), (128, 64, 4.5), (80, 40, 4.8), (16, 16, 6.0)])
def test_bits_an_element(head_dim: int, group: int, bits: float) -> None:
    form = form_of(head_dim)
    assert (form.group, 8 * form.head_bytes / head_dim) == (group, bits)


@pytest.mark.parametrize("instruction_set", sets())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_processor_makes_the_same_bytes(instruction_set: str, head_dim: int) -> None:
    require(instruction_set)
    operators = native.operators(instruction_set)
    for dtype in ("float32", "bfloat16"):
        form = form_of(head_dim, dtype)
        x_T2GH = random_kv(form, 700)
        expected_T2GW = packed(form, x_T2GH)
        packed_T2GW, back_T2GH = torch.zeros_like(expected_T2GW), torch.empty_like(x_T2GH)
        num_heads, sizes = torch.tensor([1400]), (head_dim, form.group, dtype == "bfloat16")
        x, to, back = (torch.tensor([each.data_ptr()]) for each in (x_T2GH, packed_T2GW, back_T2GH))
        operators.pack_kv(x, to, num_heads, sizes)
        operators.unpack_kv(to, back, num_heads, sizes)
        assert torch.equal(packed_T2GW, expected_T2GW)
        assert torch.equal(back_T2GH, there_and_back(form, x_T2GH))


# The policy.


def make(decoder: Decoder = DECODER, num_slots: int = 2) -> Int4Residency:
    shape = KvShape(decoder.layout, decoder.config.windows, num_slots, MAX_TOKENS)
    return Int4Residency(shape, PoisonedMemory)


def push(residency: Int4Residency, buffer: KvBuffer, piece: int = 7) -> None:
    """All of a prompt, in pieces."""
    row = residency.open(SLOT, len(buffer.tokens), MAX_TOKENS)
    for layer in range(buffer.layout.num_layers):
        for tokens in reversed(buffer.tokens.split(piece)):
            row.write(layer, tokens, buffer.export(layer, tokens).toreadonly()).result()


@torch.inference_mode()
def logits(residency: Int4Residency, decoder: Decoder, token_ids: Sequence[int], start: int) -> Tensor:
    """Logits `[T, V]` of one token after the other, from `start` on."""
    found = []
    for position in range(start, len(token_ids)):
        with residency.step([(SLOT, TokenRange(position, position + 1))]) as step:
            found.append(decoder.logits(decoder.forward([token_ids[position]], step.spans, step.turns)))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_over_what_was_packed(dtype: str) -> None:
    """A decoder over KV that goes through 4 bits by itself, layer by layer, has the same logits."""
    decoder = random_decoder(num_layers=5, head_dim=64, dtype=dtype)
    ids, start = prompt(60), 40
    residency = make(decoder)
    buffer, _ = prefilled(decoder, ids[:start])
    push(residency, buffer)
    got_TV = logits(residency, decoder, ids, start)
    form = Int4Format(decoder.layout)
    with torch.inference_mode():
        own = KvBuffer(decoder.layout, TokenRange(0, len(ids)))
        own.data[:, :start] = buffer.data
        for position in range(start, len(ids)):
            for kv_T2GH in own.data[2:, (position - 1 if position > start else 0) : position]:
                kv_T2GH.copy_(there_and_back(form, kv_T2GH))
            span = BufferSpan(own, TokenRange(position, position + 1))
            expected_V = decoder.logits(decoder.forward([ids[position]], [span]))[0]
            assert torch.equal(got_TV[position - start], expected_V)
    residency.open(OTHER, 1, 2).release()


def test_logits_are_close_to_those_of_full_kv() -> None:
    ids, start = prompt(100), 60
    residency = make()
    buffer, full_TV = prefilled(DECODER, ids)
    push(residency, KvBuffer.of(buffer.layout, TokenRange(0, start), buffer.data[:, :start]))
    got_TV = logits(residency, DECODER, ids, start)
    error = (got_TV - full_TV[start:]).square().mean().sqrt().item()
    print(error, full_TV.std().item())
    assert 0 < error < 0.1 * full_TV.std().item()


def test_a_local_prompt_in_chunks_goes_the_same_way() -> None:
    ids = prompt(50)
    residency = make()
    residency.open(SLOT, 50, 60)
    parts = []
    for tokens in TokenRange(0, 50).split(20):
        with torch.inference_mode(), residency.step([(SLOT, tokens)]) as step:
            got_TV = DECODER.logits(DECODER.forward(ids[tokens.start : tokens.end], step.spans, step.turns))
            parts.append(got_TV)
    _, full_TV = prefilled(DECODER, ids)
    error = (torch.cat(parts) - full_TV).square().mean().sqrt().item()
    assert 0 < error < 0.1 * full_TV.std().item()


def test_what_is_exported_is_what_steps_attend_to() -> None:
    residency = make()
    buffer, _ = prefilled(DECODER, prompt(30))
    push(residency, buffer)
    row = residency._rows[SLOT]
    tokens = TokenRange(4, 21)
    for layer in range(DECODER.layout.num_layers):
        data_T2GH = buffer.span(layer, tokens)
        expected = data_T2GH if layer < 2 else there_and_back(Int4Format(DECODER.layout), data_T2GH)
        assert bytes(row.export(layer, tokens)) == bytes(byte_view(expected))
    row.release()


def test_a_copy_holds_the_same_and_goes_on_alike() -> None:
    ids = prompt(24)
    residency = make()
    push(residency, prefilled(DECODER, ids[:20])[0])
    residency.open(OTHER, 20, 40)
    residency.copy(SLOT, OTHER, 20)
    first = logits(residency, DECODER, ids, 20)
    residency._rows[SLOT], residency._rows[OTHER] = residency._rows[OTHER], residency._rows[SLOT]
    assert torch.equal(logits(residency, DECODER, ids, 20), first)


def test_bytes_are_those_of_the_formula() -> None:
    layout, residency = DECODER.layout, make()
    packed_row = 2 * layout.num_kv_heads * 64 * 4.5 / 8
    token_bytes = 2 * layout.row_bytes + (layout.num_layers - 2) * packed_row
    push(residency, prefilled(DECODER, prompt(33))[0])
    assert residency.num_link_bytes == 0
    logits(residency, DECODER, prompt(34), 33)
    assert residency.num_link_bytes == 34 * token_bytes  # 33 come, one goes
    with residency.step([(SLOT, TokenRange(34, 35))]) as step:
        assert step.num_bytes_read == 35 * layout.token_bytes

    whole_layer = whole_pages(35 * layout.row_bytes)
    expected = KvBytes(2 * whole_layer + (layout.num_layers - 2) * whole_pages(35 * packed_row), whole_layer)
    assert residency._rows[SLOT].num_bytes == residency.bytes_for(35) == expected
    assert (residency.traits.name, residency.traits.is_exact) == ("int4", False)
    residency._rows[SLOT].release()
    assert residency._rows[SLOT].num_bytes == KvBytes()
    residency.close()


def test_a_row_that_cannot_be_opened_holds_nothing() -> None:
    class FullMemory(PoisonedMemory):
        def expect(self, num_tokens: int) -> None:
            if self._num_layers == 1:
                raise MemoryError("full")
            super().expect(num_tokens)

    shape = KvShape(DECODER.layout, DECODER.config.windows, 1, 16)
    residency = Int4Residency(shape, FullMemory)
    with pytest.raises(MemoryError, match="full"):
        residency.open(SLOT, 8, 16)
    assert residency._rows[SLOT].num_bytes == KvBytes()
    with pytest.raises(AssertionError, match="the slot is not claimed"):
        _ = residency._rows[SLOT].tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 18}, "4 bits a channel hold heads of a multiple of 4, not of 18 channels: use residency device"),
        ({"dtype": "float16"}, "4 bits a channel hold KV of bfloat16 and float32, not float16: use another dtype"),
    ],
)
def test_kv_that_cannot_be_packed_is_a_config_error(changes: dict[str, Any], message: str) -> None:
    layout = dataclasses.replace(DECODER.layout, **changes)
    with pytest.raises(ConfigError, match=message):
        make_int4(KvShape(layout, (None,) * 5, 1, 16), CPU)
