"""The table of policies for studies: the product's as they are, and comparators that are made by name."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.errors import ConfigError, ModelError
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import SlotId
from baton_lab.comparators.residencies import MAKERS, BudgetSource, make_residency
from baton_lab.comparators.traits import POLICIES
from generate_workers.residency import policies, traits
from generate_workers.residency.policies import SelectionSource
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.pool import PoolSize
from tests.support.engines.devices import on_emulated
from tests.support.engines.infinigen import DECODER, LAYOUT, SOME, KnownSource, prepared
from tests.support.kernels.paths import needs_rows

SHAPE = KvShape(LAYOUT, DECODER.config.windows, 2, 64)
CPU = CpuDevice()
OWN = [name for name in POLICIES if name not in traits.POLICIES]


@dataclass(frozen=True)
class Budgeted(BudgetSource):
    """A prepared selection without a file."""

    def load(self) -> PreparedSelection:
        return prepared(SOME)


def test_the_product_s_policies_are_as_they_are() -> None:
    assert list(MAKERS) == list(POLICIES)
    assert set(OWN) == {"window", "oracle", "h2o"}
    for name in traits.POLICIES:
        assert POLICIES[name] is traits.POLICIES[name]
        assert MAKERS[name] is policies.MAKERS[name] or name == "infinigen_int4", "made on more devices than served"


@needs_rows
@pytest.mark.parametrize("is_home", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_a_comparator_made_by_name_has_the_traits_of_its_line(name: str, is_home: bool) -> None:
    decoder = DECODER if is_home else on_emulated(DECODER)
    source = KnownSource(decoder, found=prepared())
    with contextlib.closing(make_residency(name, SHAPE, decoder.device, source)) as residency:
        assert residency.traits is POLICIES[name]
        assert residency.traits.chooses_keys
        assert not residency.traits.is_exact


def test_what_cannot_be_made_is_refused_as_by_the_product() -> None:
    with pytest.raises(ConfigError, match="'disk' is unknown: use one of device, host, .*, window, oracle, h2o$"):
        make_residency("disk", SHAPE, CPU)
    with pytest.raises(ConfigError, match="residency = 'window' keeps all KV: leave pool_tokens at 0"):
        make_residency("window", SHAPE, CPU, SelectionSource(DECODER, None, PoolSize(20)))


@needs_rows
@pytest.mark.parametrize("name", OWN)
def test_comparators_need_what_prepare_finds_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none: no selection was prepared for this model: run `baton prepare`"):
        make_residency(name, SHAPE, CPU, SelectionSource(DECODER, tmp_path / "none"))


@needs_rows
@pytest.mark.parametrize(("budget", "num_kept"), [(0.5, 20), (None, 8)])
def test_heavy_hitters_keep_the_budget_or_else_the_prepared_share(budget: float | None, num_kept: int) -> None:
    """Half of the keys are heavy and half are recent, behind a prompt of 40 tokens."""
    source = Budgeted(DECODER, budget=budget)
    with contextlib.closing(make_residency("h2o", SHAPE, CPU, source)) as residency:
        row = residency.open(SlotId(0), 40, 50)
        assert sum(row.index._budget.of(40)) == num_kept  # type: ignore[attr-defined]
        row.release()
