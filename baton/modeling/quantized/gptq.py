"""GPTQ (Frantar et al., 2023) in the format of AutoGPTQ and GPTQModel: weights of 4 or 8 bits, packed along the input
dimension.

`baton.modeling.quantized.weight_formats` reads this format when a model is loaded.

Legend: N outputs, K inputs, G groups of inputs, W words.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.modeling.families.checkpoint import StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.scaled_weight import (
    SCALE_TYPES,
    WORD_BITS,
    ScaledWeight,
    ScaleGrid,
    num_words,
    read_groups,
    unpack,
)
from baton.modeling.quantized.settings import check_pattern, described_groups, read_group_size

_REMEDY = "choose GPTQ weights of 4 or 8 bits in checkpoint_format gptq or gptq_v2"


@dataclass(frozen=True)
class GptqFormat:
    """Format of weights that have a scale and a zero point for each output and each group of inputs. The inputs of a
    group are not necessarily consecutive."""

    bits: int
    group_size: int | None
    """Number of inputs in a group that shares one scale. None: all inputs are one group."""
    act_order: bool
    """True if inputs were sorted by the size of their activations before they were quantised and grouped. This is the
    field `desc_act` of the configuration."""
    symmetric: bool
    less_one: bool
    """True if the stored zero points are 1 less than the real ones, as in version 1 of the format."""
    of_modules: tuple[tuple[str, "GptqFormat"], ...] = ()
    """Formats of modules that differ from the checkpoint's format (GPTQModel's `dynamic`), as (regular expression,
    format). A module has the format of the first expression that matches its name."""
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> "GptqFormat":
        """Read the format from the field `quantization_config` of config.json, or from quantize_config.json. Raises
        ModelError for a variant that is not supported."""
        if fields.flag("is_marlin_format"):
            raise fields.error("is_marlin_format", "true is not supported", _REMEDY)
        field = "checkpoint_format" if fields.raw.get("checkpoint_format") else "format"
        stored = str(fields.raw.get(field) or "gptq").lower()
        if stored not in ("gptq", "gptq_v2"):
            raise fields.error(field, f"{stored!r} is not supported", _REMEDY)
        fields.choice("pack_dtype", ("int32",), "int32")
        base = cls(
            _read_bits(fields),
            read_group_size(fields, "group_size"),
            act_order=fields.flag("desc_act"),
            symmetric=fields.flag("sym", default=True),
            less_one=stored == "gptq",
        )
        return replace(base, of_modules=tuple(_read_modules(fields, base)))

    @property
    def description(self) -> str:
        order = ", inputs reordered" if self.act_order else ""
        others = ", other settings for some modules" if self.of_modules else ""
        return f"gptq, {self.bits} bits, {described_groups(self.group_size)}{order}{others}"

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> ScaledWeight | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        matching = (each for pattern, each in self.of_modules if re.match(pattern, module))
        return next(matching, self)._scaled(module, shape, tensors)

    def unused_kind(self, name: str) -> str | None:
        return None

    def _scaled(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> ScaledWeight:
        num_outputs, num_inputs = shape
        grid = ScaleGrid.of_groups(shape, self.group_size)
        words_shape = num_words(num_inputs, self.bits), num_outputs
        words_WN = tensors.stored(f"{module}.qweight", {torch.int32: [words_shape]})
        scales_GN = tensors.stored(f"{module}.scales", dict.fromkeys(SCALE_TYPES, (grid.shape[::-1],)))

        def codes(start: int, stop: int) -> Tensor:
            numbers = unpack(words_WN[:, start:stop], self.bits)
            return numbers.transpose(0, 1).flatten(1)[:, :num_inputs].float()

        zeros_NG = self._zeros(f"{module}.qzeros", grid, tensors)
        groups_K = read_groups(tensors, f"{module}.g_idx", grid, required=self.act_order)
        return ScaledWeight(codes, replace(grid, columns_K=groups_K), scales_GN.T.contiguous(), zeros_NG)

    def _zeros(self, name: str, grid: ScaleGrid, tensors: StoredTensors) -> Tensor:
        """Return the zero points `[N, G]`. Version 1 of the format subtracted one from each zero point in a word, by
        subtracting words, so that a zero point of 0 borrowed from its neighbour. Adding the same word restores all."""
        num_outputs, num_groups = grid.shape
        words_GW = tensors.stored(name, {torch.int32: [(num_groups, num_words(num_outputs, self.bits))]})
        if self.less_one:
            words_GW = words_GW + sum(1 << at for at in range(0, WORD_BITS, self.bits))
        zeros_GN = unpack(words_GW, self.bits).flatten(1)[:, :num_outputs]
        middle = 1 << (self.bits - 1)
        if self.symmetric and not bool((zeros_GN == middle).all()):
            problem = f"holds zero points other than {middle}, and quantization_config has sym: true"
            remedy = "correct checkpoint_format there (gptq stores zero points less one, gptq_v2 as they are) or sym"
            raise tensors.error(name, problem, remedy)
        return zeros_GN.T.contiguous().float()


def _read_bits(fields: Fields, default: int | None = None) -> int:
    bits = fields.count("bits", default)
    if bits not in (4, 8):
        raise fields.error("bits", f"{bits} is not supported", _REMEDY)
    return bits


def _read_modules(fields: Fields, base: GptqFormat) -> Iterator[tuple[str, GptqFormat]]:
    """Yield the formats of modules whose settings differ. Modules that are not quantised ("-:") do not need one: their
    weights are stored plain."""
    rules = fields.raw.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise fields.error("dynamic", "is not an object of settings by module")
    for rule, settings in rules.items():
        if rule.startswith("-:"):
            continue
        if not isinstance(settings, Mapping):
            raise fields.error("dynamic", f"{rule}: is not an object of settings")
        own = Fields(settings, f"{fields.source}: dynamic: {rule}")
        differing = replace(
            base,
            bits=_read_bits(own, base.bits),
            group_size=read_group_size(own, "group_size") if "group_size" in settings else base.group_size,
            act_order=own.flag("desc_act", base.act_order),
            symmetric=own.flag("sym", base.symmetric),
        )
        yield check_pattern(fields, "dynamic", rule.removeprefix("+:")), differing
