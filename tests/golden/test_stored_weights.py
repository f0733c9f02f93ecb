"""Products by weights as they are stored. Where products have operands in bf16, those of many rows equal, bit by bit,
the products by the same weights in bf16. Other products are those by the exact weights, of inputs that were rounded to
integers of 16 bits."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.modeling.families.checkpoint import Checkpoint
from baton.modeling.forward.linear import PanelLinear
from baton.modeling.forward.norms import RmsNorm, Transform, unchanged
from baton.modeling.kernels import native
from baton.modeling.kernels.calls.codes import StoredWeight, joined
from baton.modeling.kernels.products import DOT, TILES, WIDENED
from baton.modeling.quantized.gguf_blocks import GgufWeight, blocks_name
from baton.modeling.quantized.weight_formats import read_format
from tests.support.kernels.paths import INSTRUCTION_SETS, has_tiles, lane, require
from tests.support.kernels.stored_values import values
from tests.support.models.gguf_blocks import TYPES, random_blocks, values_of
from tests.support.models.quantised_folders import FORMATS

N, K = 96, 512
CODE_ROWS = {DOT: 48, TILES: 4, WIDENED: math.inf}
"""Largest number of rows that are multiplied by codes, by method of multiplication."""
SIZES = (1, 2, 3, 4, 5, 7, 17, 33, 48, 49, 390)
needs_tiles = pytest.mark.skipif(not has_tiles(), reason="needs AMX")
ROUNDING = [
    pytest.param(native.NATIVE, DOT, id="native-dot"),
    pytest.param("generic", DOT, id="generic-dot", marks=lane("generic")),
    pytest.param(native.NATIVE, TILES, id="native-tiles", marks=needs_tiles),
]
"""Instruction sets and methods of multiplication that round weights to bf16."""
NOT_KEPT = {
    *("gptq_act_order", "gptq_8_bits", "packed_int4_reordered", "int8_tensor_asymmetric"),
    *("packed_int4_asymmetric", "packed_int8_asymmetric"),
}
"""Formats with integers whose codes the kernel cannot read: inputs are reordered, all outputs share a scale, or fp32
cannot represent the offsets."""


def of_blocks(type_name: str, num_outputs: int = N) -> StoredWeight:
    return GgufWeight(type_name, random_blocks(type_name, num_outputs, K)).stored()


def in_groups(of: int, offsets: bool) -> StoredWeight:
    """Groups of `of` inputs with scales that fp16 cannot represent."""
    random = torch.Generator().manual_seed(0)
    codes_NK = torch.randint(0, 16, (N, K), generator=random, dtype=torch.uint8)
    scales_NGF = torch.randn(N, K // of, 2 if offsets else 1, generator=random) / 100
    return StoredWeight(4, codes_NK, scales_NGF, zero=0 if offsets else 8)


WEIGHTS: dict[str, Callable[[], StoredWeight]] = {
    **{type_name: partial(of_blocks, type_name) for type_name in TYPES},
    "groups_of_16": partial(in_groups, 16, offsets=False),
    "groups_of_128": partial(in_groups, 128, offsets=False),
    "groups_of_128_with_offsets": partial(in_groups, 128, offsets=True),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("instruction_set", "product"), ROUNDING)
def test_products_are_those_of_the_weights_in_bf16(name: str, gated: bool, instruction_set: str, product: str) -> None:
    require(instruction_set)
    weight = WEIGHTS[name]()
    bias_N, norm = random(N, seed=1), RmsNorm(random(K, seed=2), 1e-5)
    stored, plain = (
        PanelLinear(each, bias_N, gated, product=product, instruction_set=instruction_set)
        for each in (weight, values(weight).bfloat16())
    )
    assert stored.num_bytes < 0.7 * plain.num_bytes
    assert torch.equal(stored.weight(), plain.weight())
    indices_T = torch.tensor([0, N - 1, 17, 17])
    assert torch.equal(stored.rows(indices_T), plain.rows(indices_T))
    for num_tokens in (size for size in SIZES if size > CODE_ROWS[product]):
        x_TK = random(num_tokens, K, seed=num_tokens)
        residual_TN = None if gated else random(num_tokens, N, seed=3)
        for each in (norm, unchanged):
            check_equal(stored, plain, x_TK, each, residual_TN)


def check_equal(
    stored: PanelLinear, plain: PanelLinear, x_TK: Tensor, norm: Transform, residual_TN: Tensor | None
) -> None:
    assert torch.equal(stored(x_TK, norm, residual_TN), plain(x_TK, norm, residual_TN)), len(x_TK)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("instruction_set", "product"), ROUNDING)
def test_products_of_few_rows_are_those_of_the_exact_weights(
    name: str, gated: bool, instruction_set: str, product: str
) -> None:
    require(instruction_set)
    linear = PanelLinear(WEIGHTS[name](), gated=gated, product=product, instruction_set=instruction_set)
    check_exact(linear, name, [size for size in SIZES if size <= CODE_ROWS[product]])


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("instruction_set", [pytest.param(each, marks=lane(each)) for each in INSTRUCTION_SETS])
def test_widened_operands_are_the_exact_weights(name: str, gated: bool, instruction_set: str) -> None:
    require(instruction_set)
    weight = WEIGHTS[name]()
    linear = PanelLinear(weight, gated=gated, product=WIDENED, instruction_set=instruction_set)
    assert torch.equal(linear.weight(), values(weight))
    assert torch.equal(linear.rows(torch.tensor([3, 95])), values(weight)[[3, 95]].bfloat16())
    check_exact(linear, name, SIZES)
    x_TK = random(60, K)
    for first, sizes in ((5, (13, 48, 60)), (1, (2,))):
        alone_TN = torch.cat([linear(x_TK[t : t + first]) for t in range(0, 60, first)])
        for num_tokens in sizes:
            assert torch.equal(linear(x_TK[:num_tokens]), alone_TN[:num_tokens]), "a row depends on no other"


def check_exact(linear: PanelLinear, name: str, sizes: Sequence[int]) -> None:
    """Products, with a norm before them, are those in float64 of rounded inputs, rounded to bf16. Weights that are
    rounded to bf16 would err more."""
    x_TK, gain_K = random(max(sizes), K), random(K, seed=2)
    inputs_TK = as_integers(
        RmsNorm(gain_K.double(), 1e-5)(x_TK.double()), run=16 if name in ("Q6_K", "groups_of_16") else 32
    )
    exact_TN, rounded_TN = (
        reference(inputs_TK, weight_NK, gated=is_gated(linear))
        for weight_NK in (values(WEIGHTS[name]()), values(WEIGHTS[name]()).bfloat16())
    )
    for num_tokens in sizes:
        got_TN = linear(x_TK[:num_tokens], RmsNorm(gain_K, 1e-5)).double()
        assert close(got_TN, exact_TN[:num_tokens]), num_tokens
    assert not close(rounded_TN, exact_TN)


def as_integers(x_TK: Tensor, run: int) -> Tensor:
    """Round each run of inputs to integers of 16 bits, times a power of two."""
    x_TRI = x_TK.view(len(x_TK), -1, run)
    largest_TR1 = x_TRI.abs().amax(-1, keepdim=True)
    unit_TR1 = 2.0 ** (largest_TR1.log2().floor() - 14)
    rounded_TRI = (x_TRI / unit_TR1).round().clamp(max=32767) * unit_TR1
    assert ((rounded_TRI - x_TRI).abs() <= 2.0**-15 * largest_TR1).all()
    return rounded_TRI.view_as(x_TK)


def is_gated(linear: PanelLinear) -> bool:
    return linear(random(1, K)).shape[1] < N


def reference(inputs_TK: Tensor, weight_NK: Tensor, *, gated: bool) -> Tensor:
    """In float64, nothing rounded on the way."""
    out_TN = inputs_TK @ weight_NK.double().T
    if not gated:
        return out_TN
    gate_TI, up_TI = out_TN.chunk(2, dim=-1)
    return gate_TI * torch.sigmoid(gate_TI) * up_TI


@pytest.mark.parametrize("instruction_set", [pytest.param(each, marks=lane(each)) for each in INSTRUCTION_SETS])
@pytest.mark.parametrize("product", [WIDENED, DOT])
def test_inputs_of_all_sizes(product: str, instruction_set: str) -> None:
    """Zeros, the least and the largest numbers, outliers, and inputs that are not finite."""
    require(instruction_set)
    weight = WEIGHTS["Q4_1"]()
    linear = PanelLinear(weight, product=product, instruction_set=instruction_set)
    x_TK = random(4, K)
    x_TK[0] = 0
    x_TK[1] *= 2.0**-130
    x_TK[2] *= 2.0**110
    x_TK[3, ::40] *= 10000
    expected_TN = as_integers(x_TK[2:].double(), 32) @ values(weight).double().T
    got_TN = linear(x_TK)
    assert (got_TN[:2].abs() < 1e-30).all()
    assert close(got_TN[2:].double(), expected_TN)
    for spoiling in (torch.inf, -torch.inf, torch.nan):
        x_TK[2, 77] = spoiling
        spoilt_TN = linear(x_TK)
        assert not spoilt_TN[2].isfinite().any()
        assert torch.equal(spoilt_TN[[0, 1, 3]], got_TN[[0, 1, 3]])


def close(got_TN: Tensor, expected_TN: Tensor) -> bool:
    """Within a rounding to bf16, and errors of sums in fp32."""
    scale_T1 = expected_TN.abs().amax(-1, keepdim=True)
    return bool(((got_TN - expected_TN).abs() <= 2.0**-8 * expected_TN.abs() + 2e-5 * scale_T1).all())


@pytest.mark.parametrize("product", [WIDENED, DOT, pytest.param(TILES, marks=needs_tiles)])
@pytest.mark.parametrize(("num_outputs", "gated"), [(1, False), (40, False), (44, True), (66, True)])
def test_outputs_that_fill_no_panel(num_outputs: int, gated: bool, product: str) -> None:
    """The weight has one group of all inputs, which is longer than a strip of dequantised weights."""
    generator = torch.Generator().manual_seed(1)
    codes_NK = torch.randint(0, 16, (num_outputs, K), generator=generator, dtype=torch.uint8)
    weight = StoredWeight(4, codes_NK, torch.randn(num_outputs, 1, 2, generator=generator) / 50)
    linear = PanelLinear(weight, None, gated, product=product)
    plain = PanelLinear(values(weight).bfloat16(), None, gated, product=product)
    x_TK = random(60, K)
    for num_tokens in (1, 2, 6, 60):
        got_TN, plain_TN = linear(x_TK[:num_tokens]), plain(x_TK[:num_tokens])
        if num_tokens <= CODE_ROWS[product]:
            scale = plain_TN.abs().max()
            assert got_TN.shape == plain_TN.shape and ((got_TN - plain_TN).abs() <= 0.03 * scale).all()
        else:
            assert torch.equal(got_TN, plain_TN)
    assert linear(x_TK[:0]).shape == (0, num_outputs // 2 if gated else num_outputs)


def test_a_row_out_of_range_is_refused() -> None:
    linear = PanelLinear(of_blocks("Q4_0"), product=WIDENED)
    bound, _, _ = linear.described(unchanged)
    with pytest.raises(RuntimeError, match="there are no such rows"):
        native.operators().dequantised_rows(bound, torch.tensor([N]))


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("Q8_0", "Q4_1", "Q4_0")])
def test_joined_parts_keep_their_values(types: tuple[str, ...]) -> None:
    parts = [of_blocks(type_name, 32) for type_name in types]
    whole = joined(parts)
    assert whole is not None and whole.is_supported
    assert torch.equal(values(whole), torch.cat([values(each) for each in parts]))
    assert torch.equal(PanelLinear(whole, product=WIDENED).weight(), values(whole))


def test_parts_of_which_only_some_have_factors_are_not_joined() -> None:
    assert joined([of_blocks("Q4_K"), of_blocks("Q8_0")]) is None


@pytest.mark.parametrize("type_name", TYPES)
def test_blocks_of_gguf_files_are_kept(type_name: str, tmp_path: Path) -> None:
    blocks = random_blocks(type_name, N, K)
    save_file({blocks_name("m", type_name): blocks}, tmp_path / "model.safetensors")
    config = {"quant_method": "gguf", "types": [type_name]}
    check_kept(tmp_path, config, values_of(type_name, blocks))


@pytest.mark.parametrize("name", FORMATS)
def test_formats_whose_codes_are_integers_are_kept(name: str, tmp_path: Path) -> None:
    made = FORMATS[name].make(N, K // 2, 0)
    save_file({f"m.{part}": tensor for part, tensor in made.tensors.items()}, tmp_path / "model.safetensors")
    is_kept = name not in NOT_KEPT and not name.startswith(("float", "fp8"))
    check_kept(tmp_path, FORMATS[name].config, made.weight, is_kept=is_kept)


def check_kept(folder: Path, config: Mapping[str, object], values_NK: Tensor, *, is_kept: bool = True) -> None:
    """The checkpoint keeps the codes of the module m, and the kernel reads these values."""
    stored = read_format(config, "config.json: quantization_config")
    checkpoint = Checkpoint(folder, torch.bfloat16, "cpu", weights="stored", weight_format=stored)
    parts = [("m", (values_NK.shape[0], values_NK.shape[1]))]
    codes = checkpoint.codes(parts)
    assert (codes is not None) == is_kept == bool(checkpoint.num_kept)
    if codes is not None:
        assert torch.equal(PanelLinear(codes, product=WIDENED).weight(), values_NK)
    for weights in ("bfloat16", "int8"):
        other = Checkpoint(folder, torch.bfloat16, "cpu", weights=weights, weight_format=stored)
        assert other.codes(parts) is None
    assert Checkpoint(folder, torch.float32, "cpu", weights="stored", weight_format=stored).codes(parts) is None
