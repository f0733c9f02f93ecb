"""InfiniGen for tests: a tiny model, with bases and key selections that are not fitted to it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.sparse.bases import Basis, BasisKind
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.sampling_params import SamplingParams
from baton.types import KvLayout
from baton_lab.comparators.residencies import make_residency
from generate_workers.residency.int4.int4_infinigen import InfinigenInt4Residency
from generate_workers.residency.policies import SelectionSource
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.sparse.infinigen import InfinigenResidency
from generate_workers.residency.sparse.infinigen_pooled import PooledResidency
from generate_workers.residency.sparse.pool import Eviction, PoolSize
from tests.support.engines.devices import PoisonedCpu
from tests.support.models.tiny_models import random_decoder

DECODER = random_decoder(num_layers=5)
LAYOUT = DECODER.layout
LAYERS = range(2, LAYOUT.num_layers)
ALL = Selection(math.inf, 1.0, 0, 1)
SOME = Selection(3.0, 0.2, 2, 3)
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
LENGTHS = (40, 7, 1, 61)
NUM_COLUMNS = 6
lookaheads = pytest.mark.parametrize("lookahead", [0, 1])


def random_basis(layout: KvLayout, num_columns: int = NUM_COLUMNS) -> Basis:
    generator = torch.Generator().manual_seed(num_columns)
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, num_columns)
    q_LGHR, k_LGHR = (torch.randn(shape, generator=generator) / math.sqrt(layout.head_dim) for _ in range(2))
    return Basis(BasisKind.CENTRED, q_LGHR, k_LGHR)


def prepared(
    selection: Selection = SOME, lookahead: int = 0, basis: Basis | None = None, decoder: Decoder = DECODER
) -> PreparedSelection:
    layout = decoder.layout
    return PreparedSelection(
        basis or random_basis(layout), selection, lookahead, layout.model_fingerprint, "text", 0.9, 0.1
    )


def infinigen(
    found: PreparedSelection, decoder: Decoder = DECODER
) -> Callable[[KvShape, MakeMemory], InfinigenResidency]:
    return lambda shape, make: InfinigenResidency(shape, make, found, decoder)


def infinigen_int4(
    found: PreparedSelection, decoder: Decoder = DECODER
) -> Callable[[KvShape, MakeMemory], InfinigenInt4Residency]:
    return lambda shape, make: InfinigenInt4Residency(shape, make, found, decoder)


def pooled(
    num_tokens: int, eviction: Eviction = Eviction.COUNTER, selection: Selection = SOME, lookahead: int = 0
) -> Callable[[KvShape, MakeMemory], PooledResidency]:
    """Return a function that creates an InfiniGen residency with a pool of `num_tokens` tokens."""
    size = PoolSize(num_tokens, eviction)
    return lambda shape, make: PooledResidency(shape, PoisonedCpu(), prepared(selection, lookahead), DECODER, size)


@dataclass(frozen=True)
class KnownSource(SelectionSource):
    """Source of a prepared selection that is kept in memory instead of a file."""

    found: PreparedSelection | None = None

    def load(self) -> PreparedSelection:
        assert self.found is not None
        return self.found


def configured(
    name: str, decoder: Decoder, found: PreparedSelection, pool: PoolSize | None = None
) -> Callable[[KvShape, MakeMemory], Residency]:
    """Return a function that creates the residency called `name` on the decoder's device, either the product's or one
    of the comparison."""
    source = KnownSource(decoder, pool=pool, found=found)
    return lambda shape, make: make_residency(name, shape, decoder.device, source)


def partial_of(k_SGH: Tensor, basis: Basis, layer: int) -> Tensor:
    """Return the partial keys of `k_SGH` in bf16, computed one KV head after the other."""
    heads = range(k_SGH.shape[1])
    return torch.stack([k_SGH[:, g].float() @ basis.k_LGHR[layer, g] for g in heads], dim=1).bfloat16()
