"""AWQ (Lin et al., 2023) in the format that AutoAWQ stores for its GEMM kernels: weights of 4 bits, packed along the
output dimension.

`baton.modeling.quantized.weight_formats` reads this format when a model is loaded.

Legend: N outputs, K inputs, G groups of inputs, W words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.scaled_weight import SCALE_TYPES, WORD_BITS, ScaledWeight, ScaleGrid, num_words, unpack
from baton.modeling.quantized.settings import described_groups, read_group_size

_BITS = 4
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Position, in units of 4 bits, at which a 32-bit word holds each of its eight outputs. Even outputs are in the lower
half of the word."""


@dataclass(frozen=True)
class AwqFormat:
    """Weights of 4 bits with a scale and a zero point for each output and group of inputs."""

    group_size: int | None
    """Number of inputs in a group that shares one scale. None: all inputs are one group."""
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> "AwqFormat":
        """Read the format from the field `quantization_config` of config.json, or from quant_config.json. Raises
        ModelError if the weights are packed in a way that is not supported."""
        remedy = "choose AWQ weights of 4 bits with zero points, packed by AutoAWQ for gemm"
        bits, group_size = ("w_bit", "q_group_size") if "w_bit" in fields.raw else ("bits", "group_size")
        if fields.count(bits) != _BITS:
            raise fields.error(bits, f"{fields.raw[bits]!r} is not supported", remedy)
        layout = "version" if fields.raw.get("version") else "format"
        if str(fields.raw.get(layout) or "gemm").lower() != "gemm":
            raise fields.error(layout, f"{fields.raw[layout]!r} is not supported", remedy)
        if fields.raw.get("backend") == "llm-awq":
            raise fields.error("backend", "'llm-awq' is not supported", remedy)
        if not fields.flag("zero_point", default=True):
            raise fields.error("zero_point", "false is not supported", remedy)
        return cls(read_group_size(fields, group_size))

    @property
    def description(self) -> str:
        return f"awq, 4 bits, {described_groups(self.group_size)}"

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> ScaledWeight | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        num_outputs, num_inputs = shape
        grid = ScaleGrid.of_groups(shape, self.group_size)
        num_groups, width = grid.shape[1], num_words(num_outputs, _BITS)
        words_KW = tensors.stored(f"{module}.qweight", {torch.int32: [(num_inputs, width)]})
        zeros_GW = tensors.stored(f"{module}.qzeros", {torch.int32: [(num_groups, width)]})
        scales_GN = tensors.stored(f"{module}.scales", dict.fromkeys(SCALE_TYPES, (grid.shape[::-1],)))

        def codes(start: int, stop: int) -> Tensor:
            first, end = start * _BITS // WORD_BITS, num_words(stop, _BITS)
            return _by_output(words_KW[:, first:end])[: stop - start].float()

        zeros_NG = _by_output(zeros_GW)[:num_outputs].float()
        return ScaledWeight(codes, grid, scales_GN.T.contiguous(), zeros_NG)

    def unused_kind(self, name: str) -> str | None:
        return None


def _by_output(words_KW: Tensor) -> Tensor:
    """Return the numbers in these words, `[N, K]`, one row for each output."""
    return unpack(words_KW, _BITS).index_select(-1, _PLACES).flatten(1).T.contiguous()
