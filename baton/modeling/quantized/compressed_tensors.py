"""Formats of the compressed-tensors library: FP8 and int8 weights with scales, and int4 and int8 weights packed into
words.

`baton.modeling.quantized.weight_formats` reads these formats when a model is loaded. The modules of one checkpoint may
have different formats.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from baton.modeling.families.checkpoint import StoredTensors
from baton.modeling.families.fields import Fields
from baton.modeling.quantized.leftovers import ACTIVATIONS, KV_CACHE, unused_kind
from baton.modeling.quantized.scaled_weight import SCALE_TYPES, ScaledWeight, read_groups
from baton.modeling.quantized.weight_scheme import LAYOUTS, REMEDY, WeightScheme

_MIXED = "mixed-precision"
"""Value of the checkpoint's `format` field if each scheme in `config_groups` specifies its own format."""


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """Format of a checkpoint whose weights are stored in one or several `schemes`. Modules that the checkpoint lists as
    ignored have weights that are not quantised."""

    schemes: tuple[WeightScheme, ...]
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> "CompressedTensorsFormat":
        """Read the format from the field `quantization_config` of config.json. Raises ModelError for sparse weights and
        for formats that are not supported."""
        _refuse_sparse(fields)
        layout = fields.raw.get("format")
        if layout not in (*LAYOUTS, _MIXED):
            raise fields.error("format", f"{layout!r} is not supported", REMEDY)
        groups = list(_groups(fields))
        unused = []
        if any(group.raw.get(f"{side}_activations") is not None for group in groups for side in ("input", "output")):
            unused.append(ACTIVATIONS)
        if fields.raw.get("kv_cache_scheme") is not None:
            unused.append(KV_CACHE)
        schemes = [WeightScheme.read(group, layout) for group in groups if group.raw.get("weights") is not None]
        return cls(tuple(schemes), tuple(unused))

    @property
    def description(self) -> str:
        kinds = dict.fromkeys(scheme.description for scheme in self.schemes)
        return f"compressed-tensors, {' and '.join(kinds) or 'weights as they are'}"

    def weight(self, module: str, shape: tuple[int, ...], tensors: StoredTensors) -> ScaledWeight | None:
        name = f"{module}.weight_scale"
        if not tensors.has(name):
            return None
        ranked = [(rank, scheme) for scheme in self.schemes if (rank := scheme.rank(module)) is not None]
        if not ranked:
            remedy = "use the config.json that belongs to the weights"
            raise tensors.error(name, "belongs to no target of quantization_config.config_groups", remedy)
        scheme = min(ranked, key=lambda pair: pair[0])[1]
        grid = scheme.sharing.grid(shape)
        scales = tensors.stored(name, grid.allowed(*SCALE_TYPES))
        codes, zeros_RC = scheme.codes(module, shape, tensors), scheme.zeros(module, grid, tensors)
        if scheme.sharing.strategy == "group":
            groups_K = read_groups(tensors, f"{module}.weight_g_idx", grid, required=scheme.sharing.reordered)
            grid = replace(grid, columns_K=groups_K)
        return ScaledWeight(codes, grid, scales, zeros_RC, has_integers=scheme.kind == "int")

    def unused_kind(self, name: str) -> str | None:
        return unused_kind(name)


def _refuse_sparse(fields: Fields) -> None:
    sparsity = fields.raw.get("sparsity_config") or {}
    format = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if format != "dense":
        remedy = "choose a model whose weights are not stored sparse"
        raise fields.error("sparsity_config", f"format {format!r} is not supported", remedy)
    if fields.raw.get("transform_config"):
        raise fields.error("transform_config", "is not supported", "choose a model without transforms of its inputs")


def _groups(fields: Fields) -> Iterator[Fields]:
    groups = fields.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise fields.error("config_groups", "is not an object of schemes by name")
    for name, group in groups.items():
        yield Fields(group, f"{fields.source}: config_groups: {name}")
