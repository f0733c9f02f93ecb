"""What a device promises about its streams, its memory and pinned home memory. What every device promises is tested by
tests/conformance/test_devices.py, which has parameters for a GPU."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.modeling.device.port import Device
from baton.modeling.kv.buffers import OUT_OF_MEMORY
from baton.types import KvLayout, TokenRange

LAYOUT = KvLayout("weights", num_layers=3, num_kv_heads=2, head_dim=64, dtype="float32")
SIZE = 1 << 20


def test_a_store_brings_what_was_computed_before(device: Device) -> None:
    home = torch.zeros(SIZE)
    there = torch.zeros(SIZE, device=device.torch_device)
    for value in range(1, 20):
        there += 1
        transfer = device.link.store([(home, there)])
        transfer.result()
        assert bool((home == value).all())


def test_memory_that_is_dropped_before_its_copy_is_done_keeps_its_bytes(device: Device) -> None:
    """Its allocator must not give it to another tensor while the link reads it."""
    homes = [torch.zeros(SIZE) for _ in range(20)]
    transfers = []
    for value, home in enumerate(homes):
        there = torch.full((SIZE,), float(value), device=device.torch_device)
        transfers.append(device.link.store([(home, there)]))
        del there
        torch.full((SIZE,), -1.0, device=device.torch_device)
    for value, (home, transfer) in enumerate(zip(homes, transfers, strict=True)):
        transfer.result()
        assert bool((home == value).all())


def test_both_directions_run_at_once(device: Device) -> None:
    homes, theres = ([torch.full((SIZE,), 1.0 + part, device=where) for part in range(2)] for where in places(device))
    for _ in range(10):
        one = device.link.fetch([(theres[0], homes[0])], after=device.link.queued())
        two = device.link.store([(homes[1], theres[1])])
        one.result()
        two.result()
    assert [float(each[0]) for each in (*theres, *homes)] == [1.0, 2.0, 1.0, 2.0]


def test_threads_share_a_link_and_every_byte_counts(device: Device) -> None:
    fetched, stored, num_threads, rounds = device.link.num_bytes_fetched, device.link.num_bytes_stored, 4, 50

    def copy(number: int) -> bool:
        home, there = torch.full((256,), float(number)), torch.zeros(256, device=device.torch_device)
        back = torch.zeros(256)
        for _ in range(rounds):
            device.link.fetch([(there, home)], after=device.link.queued()).result()
            device.link.store([(back, there)]).result()
        return bool((back == number).all())

    with ThreadPoolExecutor(num_threads) as pool:
        assert all(pool.map(copy, range(num_threads)))
    assert device.link.num_bytes_fetched - fetched == num_threads * rounds * 1024
    assert device.link.num_bytes_stored - stored == num_threads * rounds * 1024


def test_a_rows_memory_goes_when_it_is_released(device: Device) -> None:
    memory = device.row_memory(LAYOUT, 4096)
    before = device.memory_use.num_bytes
    for _ in range(50):
        memory.expect(4096)
        memory.commit(TokenRange(0, 4096))
        memory.release()
    assert memory.num_bytes == 0
    assert device.memory_use.num_bytes == before


@pytest.mark.gpu
def test_home_memory_is_pinned(device: Device) -> None:
    memory = device.home_memory(LAYOUT, 100)
    memory.expect(100)
    assert memory.data_LS2GH.is_pinned()
    assert memory.data_LS2GH.device.type == "cpu"
    assert device.home_buffer(LAYOUT, TokenRange(3, 50)).data.is_pinned()


def test_pushed_bytes_in_staging_frames_come_to_the_device(device: Device) -> None:
    pool = device.pool_memory(LAYOUT, 2, 4)
    frames = pool.access.frames
    assert frames is not None
    taken = frames.take(2).result(0)
    for value, frame in enumerate(taken):
        frame[: LAYOUT.row_bytes] = torch.full((LAYOUT.row_bytes // 4,), value + 1.0).numpy().tobytes()
    pool.take([0, 1])
    writes = [([pool.data_LPS2GH[2, 1, value]], frame[: LAYOUT.row_bytes]) for value, frame in enumerate(taken)]
    pool.access.write(writes, after=None).result()
    frames.give(taken)
    assert all(bool((pool.data_LPS2GH[2, 1, value] == value + 1).all()) for value in range(2))
    assert frames.num_free == frames.num_frames
    pool.give([0, 1])


@pytest.mark.gpu
def test_staging_frames_are_pinned(device: Device) -> None:
    frames = device.pool_memory(LAYOUT, 2, 4).access.frames
    assert frames is not None
    [frame] = frames.take(1).result(0)
    staged = frames.tensor_of(frame)
    assert staged is not None
    assert staged.is_pinned()
    frames.give([frame])


@pytest.mark.gpu
def test_a_fetch_of_pinned_memory_does_not_hold_up_the_host(device: Device) -> None:
    """The device computes for a while before the copy may begin: the host is back before that, and the bytes come."""
    home = torch.ones(1 << 24, pin_memory=True)
    there = torch.zeros(1 << 24, device=device.torch_device)
    compute(device)
    transfer = device.link.fetch([(there, home)], after=device.link.queued())
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    transfer.join()
    assert float(there.sum()) == len(home)


@pytest.mark.gpu
def test_a_fetch_that_waits_for_nothing_ends_while_the_device_computes(device: Device) -> None:
    homes = [torch.full((1 << 20,), 1.0 + part, pin_memory=True) for part in range(2)]
    there = torch.zeros(2, 1 << 20, device=device.torch_device)
    torch.cuda.synchronize()
    compute(device)
    device.link.fetch(list(zip(there, homes, strict=True)), after=None).result()
    assert not torch.cuda.current_stream().query(), "the copy waited for the device"
    assert there.mean(1).tolist() == [1.0, 2.0]


def compute(device: Device) -> None:
    """Queue work that takes the device some tenths of a second."""
    big = torch.randn(8192, 8192, device=device.torch_device)
    for _ in range(20):
        big = big @ big
        big /= big.abs().max()


@pytest.mark.gpu
def test_memory_that_the_gpu_does_not_have_is_refused_and_it_works_on(device: Device) -> None:
    limit = device.memory_use.limit_bytes
    assert limit is not None
    tokens = 2 * limit // LAYOUT.token_bytes
    with pytest.raises(OUT_OF_MEMORY):
        device.buffer(LAYOUT, TokenRange(0, tokens))
    memory = device.row_memory(LAYOUT, tokens)
    with pytest.raises(OUT_OF_MEMORY):
        memory.expect(1)
    assert memory.num_bytes == 0
    assert device.buffer(LAYOUT, TokenRange(0, 10)).num_bytes > 0


@pytest.mark.gpu
def test_use_of_memory_is_the_processes_own(device: Device) -> None:
    before = device.memory_use
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device.torch_device)
    use = device.memory_use
    assert use.num_bytes - before.num_bytes == held.nbytes
    assert use.peak_bytes >= use.num_bytes
    assert use.limit_bytes is not None
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    assert use.num_bytes < use.limit_bytes <= total


def places(device: Device) -> tuple[torch.device, torch.device]:
    """Home memory and the device's."""
    return torch.device("cpu"), device.torch_device
