"""A chain on devices with memory of their own: the KV and tokens of one process, and one layer of it on the device."""

import random

import pytest

from baton.errors import ConfigError, InvalidArgumentError, RequestCancelledError, ResourceExhaustedError
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.types import TokenRange
from prefill_workers.device_room import DeviceRoom
from tests.support.engines.chains import (
    ChainGroup,
    Hold,
    assert_right,
    poisoned_buffer,
    random_tokens,
    run_chain,
    until,
)
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.engines.slot_tables import whole_pages
from tests.support.links.link_groups import MakeConnect, communicator_connects, in_process_connects, torch_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("connects", [in_process_connects, torch_connects, communicator_connects])
@pytest.mark.parametrize("prefix_tokens", [0, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_kv_and_first_token_are_those_of_the_cpu(num_ranks: int, prefix_tokens: int, connects: MakeConnect) -> None:
    cpu = random_decoder(num_layers=3)
    with ChainGroup(on_emulated(cpu), num_ranks, connects=connects, make_buffer=poisoned_buffer) as group:
        for seed in range(3):
            assert_right(group, run_chain(group, seed, prefix_tokens=prefix_tokens), cpu)


def test_a_slow_link_changes_nothing() -> None:
    cpu = random_decoder(num_layers=3)
    with ChainGroup(on_emulated(cpu, PoisonedDevice(LinkRate(5e6, 1e-3))), 2) as group:
        assert_right(group, run_chain(group, 1, prefix_tokens=16), cpu)


def test_the_device_holds_one_layer_of_a_job_and_nothing_afterwards() -> None:
    cpu, device = random_decoder(num_layers=6, num_kv_heads=4), EmulatedDevice()
    with ChainGroup(on_emulated(cpu, device), 1) as group:
        run = run_chain(group, 3, prefix_tokens=100, num_tokens=500)
        run.reports()
        peak_bytes = device.memory_use.peak_bytes
        until(lambda: device.memory_use.num_bytes == 0)
    layer = sum(whole_pages(num * cpu.layout.row_bytes) for num in (100, 400))
    whole = 6 * whole_pages(100 * cpu.layout.row_bytes)  # the test's own prefix, before
    assert peak_bytes <= max(layer, whole)


def test_jobs_that_do_not_fit_on_the_device_are_refused_and_the_limit_holds() -> None:
    cpu = random_decoder(num_layers=3, num_kv_heads=4)
    layer = whole_pages(60 * cpu.layout.row_bytes)
    device = EmulatedDevice(LinkRate(2e6))
    decoder = on_emulated(cpu, device)
    num_bytes = weight_bytes(cpu.weights) + 2 * layer
    assert DeviceRoom.of(decoder, num_bytes).limit_bytes == 2 * layer
    with ChainGroup(decoder, 1, device_memory_bytes=num_bytes) as group:
        with pytest.raises(InvalidArgumentError, match=r"and prefill.device_memory_bytes leaves \d+ for KV: shorten"):
            run_chain(group, 1, num_tokens=200)
        hold = Hold()
        runs = [run_chain(group, seed, on_push=hold) for seed in range(2)]
        with pytest.raises(ResourceExhaustedError, match=f"of which other jobs take {2 * layer}: retry later"):
            run_chain(group, 2)
        hold.gate.set()
        for run in runs:
            assert_right(group, run, cpu)
        assert device.memory_use.num_bytes == 0, "room is given back before memory is free"
        assert_right(group, run_chain(group, 3), cpu)
    assert 0 < device.memory_use.peak_bytes <= 2 * layer


def test_where_kv_goes_between_devices_all_layers_are_promised_and_freed() -> None:
    cpu, num_layers = random_decoder(num_layers=3, num_kv_heads=4), 3
    layer = sum(whole_pages(num * cpu.layout.row_bytes) for num in (20, 40))
    device = EmulatedDevice()
    decoder, limit = on_emulated(cpu, device), num_layers * layer
    ids, chunks = random_tokens(random.Random(1), 60, cpu), [TokenRange(0, 20), TokenRange(20, 60)]
    num_bytes, refusal = weight_bytes(cpu.weights), f"3 layers of 60 tokens take {limit} bytes, and"
    tight = num_bytes + limit - 1
    with (
        ChainGroup(decoder, 2, connects=communicator_connects, device_memory_bytes=tight) as group,
        pytest.raises(InvalidArgumentError, match=refusal),
    ):
        group.submit(group.prepare(ids, chunks), order=[1])
    both = num_bytes + 2 * limit  # the ranks share the device's memory here
    with ChainGroup(decoder, 2, connects=communicator_connects, device_memory_bytes=both) as group:
        assert_right(group, group.submit(group.prepare(ids, chunks)), cpu)
        until(lambda: device.memory_use.num_bytes == 0)
    assert 0 < device.memory_use.peak_bytes <= 2 * limit


def test_weights_that_exceed_the_limit_are_refused_and_the_cpu_has_none() -> None:
    cpu = random_decoder()
    with pytest.raises(ConfigError, match="prefill.device_memory_bytes = 1000 is out of range: weights take"):
        DeviceRoom.of(on_emulated(cpu), 1000)
    assert DeviceRoom.of(cpu, 1000).limit_bytes is None
    assert DeviceRoom.of(on_emulated(cpu)).limit_bytes is None


def test_a_job_that_is_given_up_gives_its_memory_back() -> None:
    device = EmulatedDevice(LinkRate(1e6))
    decoder = on_emulated(random_decoder(num_layers=3), device)
    with ChainGroup(decoder, 2) as group:
        hold = Hold()
        run = run_chain(group, 2, on_push=hold)
        for engine in group.engines:
            engine.cancel(run.job.number)
        hold.gate.set()
        assert isinstance(run.error(0), RequestCancelledError)
        group.wait_idle()
        assert_right(group, run_chain(group, 4), random_decoder(num_layers=3))
        until(lambda: device.memory_use.num_bytes == 0)
