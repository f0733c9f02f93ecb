"""Random weights in the formats of quantised checkpoints, and their values, computed element by element.

The code follows the public descriptions of the formats, with plain integers and float64, and uses nothing of
`baton.modeling.quantized`: it is slow, but easy to verify. A value is (code - zero) * scale, rounded once to fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

WORD = 1 << 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order in which AutoAWQ packs eight outputs into a word: output `AWQ_ORDER[i]` uses bits 4 * i to 4 * i + 3."""


@dataclass(frozen=True)
class Quantised:
    """A weight in a quantised format: its tensors, by their name relative to the module, and the plain weight that they
    represent."""

    tensors: dict[str, Tensor]
    weight: Tensor


Maker = Callable[[int, int, int], Quantised]
"""Function (number of outputs, number of inputs, seed) that creates a random weight."""


def gptq(
    num_outputs: int,
    num_inputs: int,
    seed: int,
    *,
    bits: int = 4,
    group_size: int = -1,
    act_order: bool = False,
    symmetric: bool = True,
    version: int = 1,
    scale_dtype: torch.dtype = torch.float16,
) -> Quantised:
    """Return a weight in the GPTQ format: a word packs consecutive inputs, version 1 stores zero points minus one, and
    g_idx holds each input's group."""
    random = np.random.default_rng(seed)
    groups = _groups(num_inputs, group_size)
    if act_order:
        random.shuffle(groups)
    num_groups, middle = max(groups) + 1, 1 << (bits - 1)
    codes = random.integers(0, 1 << bits, (num_inputs, num_outputs)).tolist()
    # Zero points include 0. In version 1, 0 is stored as -1, which borrows from the next zero point in the word.
    shape = num_groups, num_outputs
    zeros = np.full(shape, middle) if symmetric else random.integers(0, 1 << bits, shape)
    scales = _scales(shape, num_inputs, bits, random, scale_dtype)
    a_word = 32 // bits
    words = [
        [_word([codes[row * a_word + i][n] for i in range(a_word)], bits) for n in range(num_outputs)]
        for row in range(num_inputs // a_word)
    ]
    less = sum(1 << at for at in range(0, 32, bits)) if version == 1 else 0
    packed_zeros = [
        [(_word(zeros[g][at : at + a_word], bits) - less) % WORD for at in range(0, num_outputs, a_word)]
        for g in range(num_groups)
    ]
    zero, scale = zeros.tolist(), scales.double().tolist()
    weight = [
        [(codes[k][n] - zero[groups[k]][n]) * scale[groups[k]][n] for k in range(num_inputs)]
        for n in range(num_outputs)
    ]
    return Quantised(
        {
            "qweight": _words(words),
            "qzeros": _words(packed_zeros),
            "scales": scales,
            "g_idx": torch.tensor(groups, dtype=torch.int32),
        },
        _fp32(weight),
    )


def awq(
    num_outputs: int, num_inputs: int, seed: int, *, group_size: int = -1, scale_dtype: torch.dtype = torch.float16
) -> Quantised:
    """Return a weight in the AWQ format for gemm: a word packs consecutive outputs in AutoAWQ's order."""
    random = np.random.default_rng(seed)
    groups = _groups(num_inputs, group_size)
    shape = max(groups) + 1, num_outputs
    codes, zeros = (random.integers(0, 16, size).tolist() for size in ((num_inputs, num_outputs), shape))
    scales = _scales(shape, num_inputs, 4, random, scale_dtype)

    def packed(rows: Sequence[Sequence[int]]) -> Tensor:
        return _words(
            [[_word([row[at + place] for place in AWQ_ORDER], 4) for at in range(0, num_outputs, 8)] for row in rows]
        )

    scale = scales.double().tolist()
    weight = [
        [(codes[k][n] - zeros[groups[k]][n]) * scale[groups[k]][n] for k in range(num_inputs)]
        for n in range(num_outputs)
    ]
    return Quantised({"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, _fp32(weight))


def packed_ints(
    num_outputs: int,
    num_inputs: int,
    seed: int,
    *,
    bits: int = 4,
    group_size: int = -1,
    symmetric: bool = True,
    reordered: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Quantised:
    """Return a weight in the pack-quantized format of compressed-tensors. Codes are signed and stored with half their
    range added. A word packs consecutive inputs for codes, and consecutive outputs for zero points."""
    random = np.random.default_rng(seed)
    groups = _groups(num_inputs, group_size)
    if reordered:
        random.shuffle(groups)
    shape = num_outputs, max(groups) + 1
    half, a_word = 1 << (bits - 1), 32 // bits
    codes = random.integers(-half, half, (num_outputs, num_inputs)).tolist()
    zeros = np.zeros(shape, int) if symmetric else random.integers(-half, half, shape)
    scales = _scales(shape, num_inputs, bits, random, scale_dtype)
    words = [
        [_word([code + half for code in codes[n][at : at + a_word]], bits) for at in range(0, num_inputs, a_word)]
        for n in range(num_outputs)
    ]
    tensors = {
        "weight_packed": _words(words),
        "weight_scale": scales,
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(
            [
                [_word([zero + half for zero in zeros[at : at + a_word, c]], bits) for c in range(shape[1])]
                for at in range(0, num_outputs, a_word)
            ]
        )
    if reordered:
        tensors["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    zero, scale = zeros.tolist(), scales.double().tolist()
    weight = [
        [(codes[n][k] - zero[n][groups[k]]) * scale[n][groups[k]] for k in range(num_inputs)]
        for n in range(num_outputs)
    ]
    return Quantised(tensors, _fp32(weight))


def plain_codes(
    num_outputs: int,
    num_inputs: int,
    seed: int,
    *,
    kind: str = "float",
    block: tuple[int, int] = (1, 1 << 30),
    scale_shape: tuple[int, ...] | None = None,
    scale_name: str = "weight_scale",
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> Quantised:
    """Return a weight with codes in FP8 (`kind` "float") or int8. Each block of outputs and inputs has a scale. Scales
    are stored with shape `scale_shape`."""
    random = np.random.default_rng(seed)
    rows, columns = (min(size, limit) for size, limit in zip(block, (num_outputs, num_inputs), strict=True))
    shape = -(-num_outputs // rows), -(-num_inputs // columns)
    if kind == "float":
        codes = torch.from_numpy(random.uniform(-400, 400, (num_outputs, num_inputs))).to(torch.float8_e4m3fn)
    else:
        codes = torch.from_numpy(random.integers(-128, 128, (num_outputs, num_inputs))).to(torch.int8)
    zeros = np.zeros(shape, int) if symmetric else random.integers(-128, 128, shape)
    scales = _scales(shape, num_inputs, 9 if kind == "float" else 8, random, scale_dtype)
    values, zero, scale = codes.double().tolist(), zeros.tolist(), scales.double().tolist()
    weight = [
        [(values[n][k] - zero[n // rows][k // columns]) * scale[n // rows][k // columns] for k in range(num_inputs)]
        for n in range(num_outputs)
    ]
    stored = scales if scale_shape is None else scales.reshape(scale_shape)
    tensors = {"weight": codes, scale_name: stored.contiguous()}
    if not symmetric:
        tensors["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8).reshape(stored.shape)
    return Quantised(tensors, _fp32(weight))


def _groups(num_inputs: int, group_size: int) -> list[int]:
    return [0 if group_size == -1 else k // group_size for k in range(num_inputs)]


def _scales(
    shape: tuple[int, ...], num_inputs: int, bits: int, random: np.random.Generator, dtype: torch.dtype
) -> Tensor:
    """Return random scales with which codes of `bits` bits give weights of about 1.5 / sqrt(num_inputs)."""
    size = 1.5 / num_inputs**0.5 / (1 << (bits - 2))
    return torch.from_numpy(size * random.uniform(0.5, 1.5, shape)).to(dtype)


def _word(numbers: Sequence[int], bits: int) -> int:
    """Pack the numbers into a word, starting at its lowest bits."""
    word = 0
    for place, number in enumerate(numbers):
        assert 0 <= number < 1 << bits
        word |= int(number) << (bits * place)
    return word


def _words(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


def _fp32(rows: list[list[float]]) -> Tensor:
    return torch.from_numpy(np.array(rows, np.float64).astype(np.float32))
