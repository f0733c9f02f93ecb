"""Factory of residency policies by name, for studies. It creates Baton's own policies and the comparators, which serve
only for comparison.

`baton_lab.quality` and the benchmarks create their policies here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.modeling.device.port import Device
from baton_lab.comparators.fetched_h2o import FetchedH2oResidency
from baton_lab.comparators.fetched_infinigen_int4 import FetchedInt4Residency
from baton_lab.comparators.fetched_window import FetchedWindowResidency
from baton_lab.comparators.h2o import H2oResidency
from baton_lab.comparators.heavy_hitters import HeavyBudget
from baton_lab.comparators.oracle import OracleResidency
from baton_lab.comparators.window import WindowResidency
from generate_workers.residency import policies as product
from generate_workers.residency.policies import Make, SelectionSource, require_others, selecting
from generate_workers.residency.port import KvShape, Residency


@dataclass(frozen=True)
class BudgetSource(SelectionSource):
    """Inputs of policies that select keys (SelectionSource), with the additional field `budget`. If `budget` is set,
    policy `h2o` does not read the selection file that `baton prepare` wrote for the model."""

    budget: float | None = None
    """Fraction of a sequence's keys to attend to. None: `Selection.most_share`, the maximum fraction in the model's
    selection file."""


def _window(shape: KvShape, source: SelectionSource) -> Residency:
    device = source.decoder.device
    if device.is_home:
        return WindowResidency(shape, device.row_memory, source.load().selection)
    require_others("window", shape)
    return FetchedWindowResidency(shape, device, source.load().selection)


def _oracle(shape: KvShape, source: SelectionSource) -> Residency:
    device = source.decoder.device
    return OracleResidency(shape, device.row_memory, source.load().selection, reads_home=device.is_home)


def _h2o(shape: KvShape, source: SelectionSource) -> Residency:
    decoder = source.decoder
    budget = source.budget if isinstance(source, BudgetSource) else None
    halved = HeavyBudget.halved(source.load().selection.most_share if budget is None else budget)
    if decoder.device.is_home:
        return H2oResidency(shape, decoder.device.row_memory, decoder, halved)
    require_others("h2o", shape)
    return FetchedH2oResidency(shape, decoder, halved)


def _infinigen_int4(shape: KvShape, source: SelectionSource) -> Residency:
    if source.decoder.device.is_home:
        return product.infinigen_int4(shape, source)
    require_others("infinigen_int4", shape)
    return FetchedInt4Residency(shape, source.load_early(), source.decoder)


MAKERS: Mapping[str, Make] = {
    **product.MAKERS,
    "window": selecting("window", _window),
    "oracle": selecting("oracle", _oracle),
    "h2o": selecting("h2o", _h2o),
    "infinigen_int4": selecting("infinigen_int4", _infinigen_int4),
}
"""Functions that create the policies in `traits.POLICIES`, by the policy's name."""


def make_residency(name: str, shape: KvShape, device: Device, source: SelectionSource | None = None) -> Residency:
    """Create the policy with the given name, like `generate_workers.residency.policies.make_residency`, but also accept
    the names of comparators (policies that serve only for comparison). Raises the same errors as that function."""
    return product.make_residency(name, shape, device, source, MAKERS)
