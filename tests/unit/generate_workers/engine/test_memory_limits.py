"""How much memory KV may take: what is configured, or what the machine has."""

import dataclasses
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.port import MemoryUse
from baton.modeling.forward.linear import PanelLinear, has_panel_linear
from baton.modeling.forward.weight_sizes import bytes_per_step, weight_bytes
from baton.modeling.kernels import native
from baton.modeling.kernels.process_kernels import KERNELS
from baton.modeling.kernels.products import WIDENED
from baton.process.memory import free_bytes
from baton.types import KernelChoice
from generate_workers.config import EngineConfig
from generate_workers.engine.device_steps import device_step_bytes
from generate_workers.engine.memory_limits import make_memory
from generate_workers.residency.port import KvBytes
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import TensorDevice, on_emulated
from tests.support.engines.generation import eos_decoder
from tests.support.kernels.paths import require
from tests.support.models.tiny_models import random_decoder

DECODER = eos_decoder()
WEIGHTS = weight_bytes(DECODER.weights)


def limits(config: EngineConfig) -> MemoryLimits:
    return make_memory(DECODER, config).limits


def test_by_default_all_slots_fit_whole() -> None:
    memory = make_memory(DECODER, EngineConfig(num_slots=3, max_slot_tokens=100))
    assert memory.limits == MemoryLimits(3 * memory.residency.bytes_for(100).home)


def test_by_default_kv_takes_half_of_what_is_free_at_most() -> None:
    few = limits(EngineConfig(num_slots=64, max_slot_tokens=1 << 24)).kv_bytes
    assert few == pytest.approx(free_bytes() / 2, rel=0.2)  # others take and give meanwhile


class Gpu(TensorDevice):
    """Device with memory of its own, whose free bytes are given."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.memory_use = MemoryUse(free, 0, 0)


@pytest.mark.parametrize("residency", ["device", "host"])
def test_kv_in_device_memory_is_bounded_by_it_and_kv_on_the_host_by_the_host(
    residency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with more memory than the host has left keeps all of its KV; KV that stays on the host does not."""
    monkeypatch.setattr("generate_workers.engine.memory_limits.free_bytes", lambda: 6_000_000)
    decoder = random_decoder(device=Gpu(20_000_000))
    config = EngineConfig(num_slots=256, max_slot_tokens=1024, residency=residency, speculation="off")
    memory = make_memory(decoder, config, 3)
    kv_bytes = 18_000_000 if residency == "device" else 1_000_000
    assert memory.limits == MemoryLimits(kv_bytes, 18_000_000 - memory.residency.scratch_bytes)


def test_of_two_limits_by_one_device_the_device_s_is_named() -> None:
    both = MemoryLimits(100, 100)
    assert both.exceeded_by(KvBytes(101, 101)) == "device_memory_bytes leaves 100 for KV"
    assert both.exceeded_by(KvBytes(101, 0)) == "kv_memory_bytes = 100"


def test_weights_come_off_the_device_s_memory() -> None:
    config = EngineConfig(kv_memory_bytes=1 << 20, device_memory_bytes=WEIGHTS + 50_000)
    assert limits(config) == MemoryLimits(1 << 20, 50_000)


def test_steps_that_run_whole_on_a_device_come_off_its_memory() -> None:
    decoder = random_decoder(device=TensorDevice())
    decoder.has_triton_rows = True
    weights = weight_bytes(decoder.weights)
    few = EngineConfig(num_slots=2, max_slot_tokens=100, device_memory_bytes=weights + 4_000_000)
    num_bytes = device_step_bytes(decoder, few)
    assert num_bytes > 2 * 100 * decoder.config.vocab_size
    assert make_memory(decoder, few).limits.device_bytes == 4_000_000 - num_bytes
    without = dataclasses.replace(few, step_graphs=False)
    assert make_memory(decoder, without).limits.device_bytes == 4_000_000
    assert device_step_bytes(decoder, dataclasses.replace(few, residency="host")) == 0
    with pytest.raises(ConfigError, match=f"weights take {weights} and step_graphs {num_bytes}, use more"):
        make_memory(decoder, dataclasses.replace(few, device_memory_bytes=weights + num_bytes))


def test_a_device_s_limit_from_before_is_forgotten() -> None:
    """A process that becomes an engine may have been a rank with a limit of its own."""
    decoder = on_emulated(DECODER, EmulatedDevice())
    decoder.device.bound(1000)
    config = EngineConfig(num_slots=2, max_slot_tokens=100)
    assert make_memory(decoder, config).limits.device_bytes is None
    assert decoder.device.memory_use.limit_bytes is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(device_memory_bytes=WEIGHTS), "device_memory_bytes = .* weights take .* use more"),
        (EngineConfig(device_memory_bytes=WEIGHTS + 5), "device_memory_bytes leaves 5 for KV, less than one token"),
        (EngineConfig(kv_memory_bytes=5), "kv_memory_bytes = 5, less than one token of KV takes: raise it"),
    ],
)
def test_a_group_that_could_serve_nothing_does_not_start(config: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_memory(DECODER, config)


def test_an_unknown_policy_is_named() -> None:
    unknown: Any = "disk"
    with pytest.raises(ConfigError, match="residency: 'disk' is unknown: use one of device, host,"):
        EngineConfig(residency=unknown)


def test_by_default_engines_of_one_machine_share_its_memory() -> None:
    config = EngineConfig(64, 1 << 24)
    alone, fourth = (make_memory(DECODER, config, number).limits.kv_bytes for number in (1, 4))
    assert fourth == pytest.approx(alone / 4, rel=0.2)


def test_a_step_reads_all_weights_but_the_embedding_that_is_no_head() -> None:
    config = DECODER.config
    embedding = config.vocab_size * config.hidden_size * 4
    assert 0 < WEIGHTS - embedding - bytes_per_step(DECODER.weights) < 0.2 * WEIGHTS  # positions besides


def test_bytes_of_weights_are_counted_as_they_are_kept() -> None:
    weight_NK = torch.ones(40, 32, dtype=torch.bfloat16)
    if not has_panel_linear():
        pytest.skip("needs a C++ compiler and a processor for it")
    ours = PanelLinear(weight_NK)
    weights = dataclasses.replace(DECODER.weights, embedding=ours, head=ours)
    ends = DECODER.weights.embedding.num_bytes + DECODER.weights.head.num_bytes * (
        DECODER.weights.head is not DECODER.weights.embedding
    )
    assert weight_bytes(weights) == WEIGHTS - ends + 64 * 32 * 2


def test_limits_name_the_one_that_is_exceeded() -> None:
    both = MemoryLimits(100, 50)
    assert both.exceeded_by(KvBytes(100, 50)) == ""
    assert both.exceeded_by(KvBytes(101, 51)).startswith("kv_memory_bytes = 100")
    assert both.exceeded_by(KvBytes(100, 51)).startswith("device_memory_bytes leaves 50")
    assert MemoryLimits(100).exceeded_by(KvBytes(100, 1 << 40)) == ""


def test_weights_that_are_kept_twice_take_memory_twice_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require(native.NATIVE)
    sizes = {}
    for torch_rows in (None, 32):
        monkeypatch.setattr(KERNELS, "_choice", KernelChoice("this", WIDENED, WIDENED, torch_rows))
        weights = random_decoder(dtype="bfloat16").weights
        sizes[torch_rows] = (bytes_per_step(weights), weight_bytes(weights))
    (read, kept), (read_of_two, kept_of_two) = sizes[None], sizes[32]
    assert read_of_two == read
    assert kept < kept_of_two
