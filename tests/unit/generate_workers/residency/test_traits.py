"""The table of policies: each line has a policy that is made by its name, and says of it what its class is."""

import contextlib
from dataclasses import dataclass

import pytest

from baton.modeling.device.cpu import CpuDevice
from baton.modeling.sparse.selection_file import PreparedSelection
from baton.types import SlotId
from generate_workers.residency.int4.format import has_int4_kernel
from generate_workers.residency.policies import MAKERS, SelectionSource, make_residency
from generate_workers.residency.port import KvShape
from generate_workers.residency.sparse.infinigen import ScoredRow
from generate_workers.residency.sparse.pool import Eviction, PoolSize
from generate_workers.residency.sparse.selective import SelectiveRow
from generate_workers.residency.traits import POLICIES, POOLED
from tests.support.engines.infinigen import DECODER, LAYOUT, prepared

SHAPE = KvShape(LAYOUT, DECODER.config.windows, 2, 64)
CPU = CpuDevice()
needs_kernels = pytest.mark.skipif(not has_int4_kernel(), reason="needs a C++ compiler")


@dataclass(frozen=True)
class Unwritten(SelectionSource):
    """A selection that was written to no file."""

    def load(self) -> PreparedSelection:
        return prepared()


def test_every_policy_in_the_table_is_made_in_the_same_order() -> None:
    assert list(MAKERS) == list(POLICIES)


@needs_kernels
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_made_by_name_has_the_traits_of_its_line(name: str) -> None:
    with contextlib.closing(make_residency(name, SHAPE, CPU, Unwritten(DECODER))) as residency:
        assert residency.traits is POLICIES[name]
        assert isinstance(residency.open(SlotId(0), 1, 1), SelectiveRow | ScoredRow) == POLICIES[name].chooses_keys


@needs_kernels
@pytest.mark.parametrize("name", [name for name, traits in POLICIES.items() if traits.has_pool])
def test_a_policy_that_takes_a_pool_is_itself_with_one(name: str) -> None:
    source = Unwritten(DECODER, pool=PoolSize(20, Eviction.LRU))
    with contextlib.closing(make_residency(name, SHAPE, CPU, source)) as residency:
        assert residency.traits is POLICIES[name]


def test_a_basis_and_a_pool_are_of_policies_that_choose_keys() -> None:
    for traits in POLICIES.values():
        assert traits.chooses_keys or not (traits.needs_basis or traits.has_pool)
        assert not (traits.chooses_keys and traits.is_exact)
    assert POOLED.split(", ") == [name for name, traits in POLICIES.items() if traits.has_pool]
