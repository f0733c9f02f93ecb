"""A chain on devices with memory of their own: the KV and tokens of one process, and one layer of it on the device."""

import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait

import pytest

from baton.errors import ChainError, ConfigError, InvalidArgumentError, RequestCancelledError, ResourceExhaustedError
from baton.modeling.device.copying import UNBOUND, LinkAccess, LinkRate, PacedLink
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.forward.attention import Kernel, default_kernel
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.buffers import KvBuffer
from baton.types import KvLayout, Rank, TokenRange
from prefill_workers.device_room import DeviceRoom
from tests.support.engines.chains import (
    WAIT_S,
    ChainGroup,
    Hold,
    assert_right,
    poisoned_buffer,
    random_tokens,
    run_chain,
    until,
)
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.engines.gated_kernels import Gate
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


@pytest.mark.parametrize("connects", [in_process_connects, communicator_connects])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_slow_link_changes_nothing(num_ranks: int, connects: MakeConnect) -> None:
    cpu = random_decoder(num_layers=3)
    with ChainGroup(on_emulated(cpu, PoisonedDevice(LinkRate(5e6, 1e-3))), num_ranks, connects=connects) as group:
        assert_right(group, run_chain(group, 1, prefix_tokens=16), cpu)


class HeldStores(PacedLink):
    """Link whose copies to host memory wait until the test permits them."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(UNBOUND)
        self.may_store = threading.Semaphore(0)
        self.error = error
        """Error that the copies raise; None: they succeed."""

    def _store(self, work: Callable[[], None], num_bytes: int) -> None:
        assert self.may_store.acquire(timeout=WAIT_S), "the test did not permit the copy"
        if self.error is not None:
            raise self.error
        super()._store(work, num_bytes)


def held(cpu: Decoder, link: HeldStores, kernel: Kernel | None = None) -> Decoder:
    """Return the model on an emulated device with this link."""
    device = EmulatedDevice()
    device.link, device._access = link, LinkAccess.plain(link)
    return Decoder(cpu.config, cpu.weights, kernel, device=device)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_attends_to_its_own_rows_while_they_are_copied_to_host_memory(num_ranks: int) -> None:
    cpu, link = random_decoder(num_layers=3), HeldStores()
    gate = Gate(default_kernel(cpu.weights.device, cpu.dtype))
    gate.shut()
    with ChainGroup(held(cpu, link, gate), num_ranks) as group:
        run = run_chain(group, 1)
        assert gate.reached.wait(WAIT_S), "attention waits for the copy"
        assert link.num_bytes_stored == 0
        assert not any(sender.pieces for sender in run.senders.values())
        gate.open()
        link.may_store.release(100)
        assert_right(group, run, cpu)


def test_a_copy_to_host_memory_that_fails_ends_its_job_and_no_other() -> None:
    cpu, link = random_decoder(num_layers=3), HeldStores(RuntimeError("the bus is gone"))
    decoder = held(cpu, link)
    link.may_store.release(100)
    with ChainGroup(decoder, 1) as group:
        failed = run_chain(group, 1)
        assert isinstance(failed.error(0), ChainError)
        assert "the bus is gone" in str(failed.error(0))
        assert failed.senders[Rank(0)].aborts == [failed.error(0)]
        link.error = None
        assert_right(group, run_chain(group, 2), cpu)
        until(lambda: decoder.device.memory_use.num_bytes == 0)


def test_a_job_that_fails_during_a_copy_keeps_its_memory_until_the_copy_has_ended() -> None:
    cpu, link = random_decoder(num_layers=3), HeldStores()
    decoder = held(cpu, link)

    def fail(*_: int) -> None:
        raise RuntimeError("the slot is gone")

    with ChainGroup(decoder, 1) as group:
        link.may_store.release()  # layer 0 is pushed while layer 1 is copied
        run = run_chain(group, 1, on_push=fail)
        assert not wait([run.futures[Rank(0)]], timeout=0.1).done
        assert decoder.device.memory_use.num_bytes > 0
        link.may_store.release(100)
        assert "the slot is gone" in str(run.error(0))
        until(lambda: decoder.device.memory_use.num_bytes == 0)
        assert_right(group, run_chain(group, 2), cpu)


def test_host_memory_for_staged_kv_is_allocated_on_the_thread_of_the_engine() -> None:
    cpu, threads = random_decoder(num_layers=3), set[str]()

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        threads.add(threading.current_thread().name)
        assert layout.num_layers == 1
        return KvBuffer(layout, tokens)

    with ChainGroup(on_emulated(cpu), 1, make_buffer=make) as group:
        assert_right(group, run_chain(group, 1), cpu)
    assert threads == {"prefill-engine"}


def test_host_memory_that_cannot_be_allocated_fails_the_job() -> None:
    cpu, is_short = random_decoder(num_layers=3), [True]

    def make(layout: KvLayout, tokens: TokenRange) -> KvBuffer:
        if is_short[0]:
            raise RuntimeError("out of pinned memory")
        return KvBuffer(layout, tokens)

    with ChainGroup(on_emulated(cpu), 1, make_buffer=make) as group:
        error = run_chain(group, 1).error(0)
        assert isinstance(error, ResourceExhaustedError)
        assert re.search(r"job 1: no memory for \d+ tokens of layer 0: retry later", str(error))
        is_short[0] = False
        assert_right(group, run_chain(group, 2), cpu)


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
