"""A chain on devices with memory of their own: the KV and tokens of one process, and one layer of it on the device."""

import random
import threading

import pytest
import torch

from baton.errors import ConfigError, InvalidArgumentError, RequestCancelledError, ResourceExhaustedError
from baton.ids import Rank
from baton.types import TokenRange
from modeling.device.copying import LinkRate
from modeling.device.emulated import EmulatedDevice
from modeling.forward.decoder import Decoder
from modeling.forward.weight_sizes import weight_bytes
from modeling.kv.memory import PAGE_BYTES
from prefill_workers.device_room import DeviceRoom
from tests.support.engines.chains import (
    WAIT_S,
    ChainGroup,
    Run,
    cached_prefix,
    largest_error,
    poisoned_buffer,
    random_chunks,
    random_tokens,
    reference,
    reference_token,
    until,
)
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.links.link_groups import MakeConnect, edge_connects, in_process_connects, torch_connects
from tests.support.models.tiny_models import random_decoder

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run_chain(
    group: ChainGroup, seed: int, prefix_tokens: int, num_tokens: int = 60, *, go_on: threading.Event | None = None
) -> Run:
    """`go_on`: for which the ranks wait before they push anything."""

    def wait(rank: Rank, layer: int) -> None:
        assert go_on is None or go_on.wait(WAIT_S)

    rng = random.Random(seed)
    ids = random_tokens(rng, num_tokens, group.decoder)
    chunks = random_chunks(rng, TokenRange(prefix_tokens, num_tokens), len(group.engines))
    prefix = (lambda: cached_prefix(group.decoder, ids, prefix_tokens)) if prefix_tokens else None
    return group.submit(group.prepare(ids, chunks, prefix=prefix, on_push=wait))


def assert_equal(cpu: Decoder, run: Run) -> None:
    kv, _ = reference(cpu, run.job.token_ids)
    assert largest_error(run.kv(cpu.layout), kv) <= 1e-5
    assert run.first_token() == reference_token(cpu, run.job)


@pytest.mark.parametrize("connects", [in_process_connects, torch_connects, edge_connects])
@pytest.mark.parametrize("prefix_tokens", [0, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_kv_and_first_token_are_those_of_the_cpu(num_ranks: int, prefix_tokens: int, connects: MakeConnect) -> None:
    cpu = random_decoder(num_layers=3)
    with ChainGroup(on_emulated(cpu), num_ranks, connects=connects, make_buffer=poisoned_buffer) as group:
        for seed in range(3):
            assert_equal(cpu, run_chain(group, seed, prefix_tokens))


def test_a_slow_link_changes_nothing() -> None:
    cpu = random_decoder(num_layers=3)
    with ChainGroup(on_emulated(cpu, PoisonedDevice(LinkRate(5e6, 1e-3))), 2) as group:
        assert_equal(cpu, run_chain(group, 1, 16))


def test_the_device_holds_one_layer_of_a_job_and_nothing_afterwards() -> None:
    cpu, device = random_decoder(num_layers=6, num_kv_heads=4), EmulatedDevice()
    with ChainGroup(on_emulated(cpu, device), 1) as group:
        run = run_chain(group, 3, 100, num_tokens=500)
        run.reports()
        peak_bytes = device.memory_use.peak_bytes
        until(lambda: device.memory_use.num_bytes == 0)
    layer = sum(-(-num * cpu.layout.row_bytes // PAGE_BYTES) * PAGE_BYTES for num in (100, 400))
    whole = -(-100 * cpu.layout.row_bytes // PAGE_BYTES) * PAGE_BYTES * 6  # the test's own prefix, before
    assert peak_bytes <= max(layer, whole)


def test_jobs_that_do_not_fit_on_the_device_are_refused_and_the_limit_holds() -> None:
    cpu = random_decoder(num_layers=3, num_kv_heads=4)
    layer = -(-60 * cpu.layout.row_bytes // PAGE_BYTES) * PAGE_BYTES
    device = EmulatedDevice(LinkRate(2e6))
    decoder = on_emulated(cpu, device)
    room = DeviceRoom.of(decoder, weight_bytes(cpu.weights) + 2 * layer)
    assert room.limit_bytes == 2 * layer
    device.bound(room.limit_bytes)
    with ChainGroup(decoder, 1, room=room) as group:
        with pytest.raises(InvalidArgumentError, match=r"and prefill.device_memory_bytes leaves \d+ for KV: shorten"):
            run_chain(group, 1, 0, num_tokens=200)
        go_on = threading.Event()
        runs = [run_chain(group, seed, 0, go_on=go_on) for seed in range(2)]
        with pytest.raises(ResourceExhaustedError, match=f"of which other jobs take {2 * layer}: retry later"):
            run_chain(group, 2, 0)
        go_on.set()
        for run in runs:
            assert_equal(cpu, run)
        assert device.memory_use.num_bytes == 0, "room is given back before memory is free"
        assert_equal(cpu, run_chain(group, 3, 0))
    assert 0 < device.memory_use.peak_bytes <= 2 * layer


def test_where_kv_goes_between_devices_all_layers_are_promised_and_freed() -> None:
    cpu, num_layers = random_decoder(num_layers=3, num_kv_heads=4), 3
    layer = sum(-(-num * cpu.layout.row_bytes // PAGE_BYTES) * PAGE_BYTES for num in (20, 40))
    device = EmulatedDevice()
    decoder, limit = on_emulated(cpu, device), num_layers * layer
    ids, chunks = random_tokens(random.Random(1), 60, cpu), [TokenRange(0, 20), TokenRange(20, 60)]
    tight, refusal = DeviceRoom(cpu.layout, limit - 1), f"3 layers of 60 tokens take {limit} bytes, and"
    with (
        ChainGroup(decoder, 2, connects=edge_connects, room=tight) as group,
        pytest.raises(InvalidArgumentError, match=refusal),
    ):
        group.submit(group.prepare(ids, chunks), order=[1])
    room = DeviceRoom(cpu.layout, 2 * limit)  # of both ranks, which share it here
    with ChainGroup(decoder, 2, connects=edge_connects, room=room) as group:
        assert_equal(cpu, group.submit(group.prepare(ids, chunks)))
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
        go_on = threading.Event()
        run = run_chain(group, 2, 0, go_on=go_on)
        for engine in group.engines:
            engine.cancel(run.job.number)
        go_on.set()
        assert isinstance(run.error(0), RequestCancelledError)
        group.wait_idle()
        assert_equal(random_decoder(num_layers=3), run_chain(group, 4, 0))
        until(lambda: device.memory_use.num_bytes == 0)
