"""Every policy on a device with memory of its own: the CPU's tokens, in memory that is counted and bounded."""

from dataclasses import dataclass

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton_lab.comparators.residencies import make_residency
from baton_lab.comparators.traits import POLICIES
from generate_workers.residency.policies import SelectionSource
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.sparse.pool import Eviction, PoolSize
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import PoisonedCpu, PoisonedDevice, on_emulated
from tests.support.engines.infinigen import configured, prepared
from tests.support.engines.selective import PROMPTS, TOKENS, Bench, MakePolicy, answers
from tests.support.engines.slot_tables import UNLIMITED
from tests.support.kernels.paths import needs_rows
from tests.support.models.tiny_models import random_decoder

PLAIN = random_decoder(num_layers=5)
CPU = Decoder(PLAIN.config, PLAIN.weights, device=PoisonedCpu())
FEW = Selection(3.0, 0.1, 2, 3, free_keys=6)
"""Chooses so few keys that most are left out."""

pytestmark = needs_rows


@dataclass(frozen=True)
class Way:
    """A policy, and a pool for it."""

    name: str
    pool: PoolSize | None = None

    def __str__(self) -> str:
        return self.name if self.pool is None else f"{self.name} pool {self.pool.eviction.value}"

    def on(self, decoder: Decoder) -> MakePolicy:
        """The policy on the decoder's device, which predicts picks a layer early."""
        return configured(self.name, decoder, prepared(FEW, 1, decoder=decoder), self.pool)


WAYS = [
    *map(Way, ("device", "host", "infinigen", "infinigen_int4", "oracle", "window", "h2o", "int4")),
    *(Way("infinigen", PoolSize(24, eviction)) for eviction in Eviction),
]
ways = pytest.mark.parametrize("way", WAYS, ids=str)
_ON_EVERY_CHANGE = ("device", "host", "infinigen", "infinigen pool counter")


def _fewer(ways: list[Way]) -> pytest.MarkDecorator:
    """Cases of policies that are served, on every change, and of those that they are compared with, in nightly runs."""
    nightly = pytest.mark.nightly
    cases = [pytest.param(way, marks=() if str(way) in _ON_EVERY_CHANGE else nightly) for way in ways]
    return pytest.mark.parametrize("way", cases, ids=str)


def served(decoder: Decoder, way: Way, limits: MemoryLimits = UNLIMITED) -> list[list[int]]:
    return answers(decoder, way.on(decoder), 30, limits)


def policy_on(decoder: Decoder, way: Way) -> Residency:
    """The policy as `answers` has it."""
    return way.on(decoder)(KvShape(decoder.layout, decoder.config.windows, 6, 128), decoder.device.row_memory)


@_fewer(WAYS)
def test_answers_are_those_of_the_cpu(way: Way) -> None:
    assert served(on_emulated(PLAIN), way) == served(CPU, way)


@ways
def test_answers_are_those_of_the_cpu_when_rows_give_way(way: Way) -> None:
    """Rows give their memory back in the same steps, because home memory is what is short."""
    limits = MemoryLimits(2 * policy_on(CPU, way).bytes_for(101).home)
    assert served(on_emulated(PLAIN), way, limits) == served(CPU, way, limits)


@_fewer(WAYS)
def test_a_device_never_holds_more_than_it_has(way: Way) -> None:
    """Rows give way because the device has room for two long ones."""
    device = PoisonedDevice(LinkRate(2e8, 1e-4))
    decoder = on_emulated(PLAIN, device)
    policy = policy_on(on_emulated(PLAIN), way)
    limits = MemoryLimits(1 << 40, 2 * policy.bytes_for(101).device)
    assert limits.device_bytes is not None
    limit = limits.device_bytes + policy.scratch_bytes
    policy.close()
    device.bound(limit)
    found = served(decoder, way, limits)
    assert [len(each) for each in found] == [30] * len(found)
    assert 0 < device.memory_use.peak_bytes <= limit
    assert device.memory_use.num_bytes <= policy.scratch_bytes


TURNING = [way for way in WAYS if way.name != "device"]
"""Policies that take turns in a step."""


@pytest.mark.parametrize("way", TURNING, ids=str)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_steps_are_those_of_the_cpu(way: Way, dtype: str) -> None:
    plain = random_decoder(num_layers=5, dtype=dtype, head_dim=64)
    cpu, there = Decoder(plain.config, plain.weights, device=PoisonedCpu()), on_emulated(plain)
    benches = [Bench.of(decoder, way.on(decoder), PROMPTS, 50) for decoder in (cpu, there)]
    for wanted, got in zip(*(bench.turns(50) for bench in benches), strict=True):
        assert torch.equal(got, wanted)
    for bench in benches:
        bench.close()


@pytest.mark.parametrize("way", TURNING, ids=str)
def test_bytes_of_steps_are_those_of_the_link(way: Way) -> None:
    decoder = on_emulated(PLAIN)
    bench, link = Bench.of(decoder, way.on(decoder), PROMPTS, 50), decoder.device.link
    fed = [dict.fromkeys(range(len(PROMPTS)), TOKENS[step : step + 1]) for step in range(12)]
    for each in (*fed, {0: TOKENS[:1], 1: TOKENS[:7]}, {1: TOKENS[:1], 2: TOKENS[:9]}):
        before = link.num_bytes_fetched + link.num_bytes_stored, bench.residency.num_link_bytes
        bench.run(each)
        counted = bench.residency.num_link_bytes - before[1]
        assert counted == link.num_bytes_fetched + link.num_bytes_stored - before[0]
    bench.close()


class Gpu(CpuDevice):
    """A device whose kernels are not the CPU's."""

    name = "cuda"
    torch_device = torch.device("cuda")
    is_home = False


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("device", "host", "infinigen")])
def test_where_only_the_cpu_has_kernels_a_gpu_is_refused(name: str) -> None:
    shape = KvShape(PLAIN.layout, PLAIN.config.windows, 1, 64)
    with pytest.raises(ConfigError, match=f"residency = '{name}' is not supported on device cuda"):
        make_residency(name, shape, Gpu())
    with pytest.raises(ConfigError, match="speculation = 'infinigen' is not supported on device cuda"):
        make_residency("device", shape, Gpu(), SelectionSource(PLAIN, serves_drafts=True))
