"""Quantisation schemes of compressed-tensors. A scheme specifies how the codes and scales of some modules are stored.

`baton.modeling.quantized.compressed_tensors` reads the schemes when a model is loaded, and uses them to read weights.

Legend: N outputs, K inputs, R rows and C columns of scales, W words.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.scaled_weight import SCALE_TYPES, ScaleGrid, fp8_values, num_words, unpack
from baton.modeling.quantized.settings import check_pattern, read_block, read_group_size

PACKED = "pack-quantized"
LAYOUTS = (PACKED, "float-quantized", "int-quantized", "naive-quantized")
REMEDY = f"choose a model in {', '.join(LAYOUTS)}, or in fp8, awq or gptq"

_PACKED_TYPES = (("int", 4), ("int", 8))
_CODE_TYPES = {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn}
"""Torch dtypes of codes that are not packed into words, by (kind, number of bits)."""
_EXPRESSION = "re:"


@dataclass(frozen=True)
class Sharing:
    """Description of which values of a weight share one scale."""

    strategy: str
    """Values that share a scale: "tensor" (all), "channel" (one output), "group" (a group of inputs) or "block"."""
    group_size: int | None = None
    block: tuple[int, int] | None = None
    reordered: bool = False
    """True if inputs were reordered before they were grouped, so that a group's inputs are not necessarily
    consecutive."""

    @classmethod
    def read(cls, fields: Fields) -> "Sharing":
        """Read the strategy and the sizes of groups or blocks from the field `weights` of a scheme. Raises ModelError
        for an invalid or missing value."""
        size = None if fields.raw.get("group_size") is None else read_group_size(fields, "group_size")
        implied = "group" if size else "tensor" if fields.raw.get("group_size") is None else "channel"
        strategy = fields.choice("strategy", ("tensor", "channel", "group", "block"), implied)
        block = read_block(fields, "block_structure")
        if strategy == "group" and size is None:
            raise fields.error("group_size", "is missing, and strategy is group")
        if strategy == "block" and block is None:
            raise fields.error("block_structure", "is missing, and strategy is block")
        order = fields.raw.get("actorder")
        return cls(strategy, size, block, reordered=order is True or order in ("group", "dynamic"))

    def grid(self, shape: tuple[int, ...]) -> ScaleGrid:
        """Return the mapping from the values of a weight with this shape to their scales."""
        if self.strategy == "tensor":
            return ScaleGrid.of_whole(shape)
        if self.strategy == "group":
            return ScaleGrid.of_groups(shape, self.group_size)
        return ScaleGrid.of_rows(shape) if self.block is None else ScaleGrid.of_blocks(shape, self.block)


@dataclass(frozen=True)
class WeightScheme:
    """Description of how the weights of some modules are stored."""

    targets: tuple[str, ...]
    """Modules that the scheme applies to. Each entry is the name of a module, a regular expression for names with the
    prefix "re:", or a class of modules: Linear or Embedding."""
    layout: str
    kind: str
    """Number type of the codes: "int" or "float"."""
    bits: int
    symmetric: bool
    sharing: Sharing

    @classmethod
    def read(cls, fields: Fields, default_layout: str) -> "WeightScheme":
        """Read a scheme from one entry of `config_groups`. `default_layout` is used if the entry has no `format`.
        Raises ModelError for a scheme that is not supported."""
        targets, settings = fields.raw.get("targets"), fields.raw.get("weights")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise fields.error("targets", "is not a list of texts")
        if not isinstance(settings, Mapping):
            raise fields.error("weights", "is not an object of settings")
        for target in targets:
            if target.startswith(_EXPRESSION):
                check_pattern(fields, "targets", target.removeprefix(_EXPRESSION))
        layout = fields.choice("format", LAYOUTS, default_layout)
        weights = Fields(settings, f"{fields.source}: weights")
        kind, bits = weights.choice("type", ("int", "float"), "int"), weights.count("num_bits", 8)
        if (kind, bits) not in (_PACKED_TYPES if layout == PACKED else _CODE_TYPES):
            raise weights.error("num_bits", f"{bits} of type {kind} are not supported in {layout}", REMEDY)
        return cls(tuple(targets), layout, kind, bits, weights.flag("symmetric", default=True), Sharing.read(weights))

    @property
    def description(self) -> str:
        """Return a short description of the scheme for messages."""
        return f"{self.layout} {self.kind}{self.bits} by {self.sharing.strategy}"

    def rank(self, module: str) -> tuple[int, str] | None:
        """Return a sort key for how specifically the scheme's targets match a module. The scheme with the smallest key
        applies.

        A module's name comes first, then a regular expression, then a class. Equal matches are sorted by the target's
        text. Returns None if no target matches.
        """
        kind = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
        ranks = []
        for target in self.targets:
            if target == module:
                ranks.append((0, target))
            elif target.startswith(_EXPRESSION) and re.match(target.removeprefix(_EXPRESSION), module):
                ranks.append((1, target))
            elif target == kind:
                ranks.append((2, target))
        return min(ranks, default=None)

    def codes(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> Callable[[int, int], Tensor]:
        """Return a function (start, stop) that returns the codes of the rows `start` to `stop` of the weight of
        `module`, in fp32. Raises ModelError for a tensor of an unexpected shape or type."""
        if self.layout != PACKED:
            codes_NK = tensors.stored(f"{module}.weight", {_CODE_TYPES[self.kind, self.bits]: [shape]})
            if self.kind == "float":
                return lambda start, stop: fp8_values(codes_NK[start:stop])
            return lambda start, stop: codes_NK[start:stop].float()
        num_outputs, num_inputs = shape
        allowed = {torch.int32: [(num_outputs, num_words(num_inputs, self.bits))]}
        words_NW = tensors.stored(f"{module}.weight_packed", allowed)
        _check_shape(f"{module}.weight_shape", shape, tensors)
        return lambda start, stop: self._signed(unpack(words_NW[start:stop], self.bits).flatten(1)[:, :num_inputs])

    def zeros(self, module: str, grid: ScaleGrid, tensors: StoredTensors) -> Tensor | None:
        """Return the zero points `[R, C]` of the weight of `module`, or None if the weight has none. If the codes are
        packed, the zero points may be packed along the rows. Raises ModelError for a tensor of an unexpected shape or
        type."""
        name = f"{module}.weight_zero_point"
        if self.symmetric and not tensors.has(name):
            return None
        num_rows, num_columns = grid.shape
        allowed = dict(grid.allowed(torch.int8, torch.float8_e4m3fn, *SCALE_TYPES))
        if self.layout == PACKED:
            allowed[torch.int32] = ((num_words(num_rows, self.bits), num_columns),)
        zeros = tensors.stored(name, allowed)
        if zeros.dtype == torch.int32:
            return self._signed(unpack(zeros, self.bits).transpose(1, 2).flatten(0, 1)[:num_rows])
        return zeros.float().view(grid.shape)

    def _signed(self, numbers: Tensor) -> Tensor:
        """Return packed numbers in fp32, shifted to be symmetric about zero."""
        return numbers.float() - (1 << (self.bits - 1))


def _check_shape(name: str, shape: tuple[int, ...], tensors: StoredTensors) -> None:
    """Raise ModelError if the tensor `name` exists and states another shape."""
    if not tensors.has(name):
        return
    stated = tensors.stored(name, {torch.int64: [(2,)], torch.int32: [(2,)]}).tolist()
    if stated != list(shape):
        remedy = "use the config.json that belongs to the weights"
        raise tensors.error(name, f"says {stated}, config.json asks for {list(shape)}", remedy)
