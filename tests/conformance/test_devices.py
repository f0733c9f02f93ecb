"""Every device keeps its two memories apart: what goes from one to the other goes over the link, whole and counted."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.errors import ConfigError
from baton.modeling.device import copying
from baton.modeling.device.copying import LinkRate
from baton.modeling.device.emulated import EmulatedDevice
from baton.modeling.device.making import make_device
from baton.modeling.device.port import Device
from baton.modeling.kv.arena import WrongMemoryError
from baton.modeling.kv.buffers import KvBuffer, byte_view
from baton.modeling.kv.row_memory import PAGE_BYTES
from baton.types import KvLayout, TokenRange
from tests.support.manual_clock import StandingTime

LAYOUT = KvLayout("weights", num_layers=3, num_kv_heads=2, head_dim=64, dtype="float32")
NUM_TOKENS = 40
TOKENS = TokenRange(0, NUM_TOKENS)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))
NAMES = ["cpu", "emulated", CUDA]
APART = ["emulated", CUDA]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = make_device(request.param)
    yield made
    made.link.rest()


def written(device: Device, make: Callable[[KvLayout, int], object] | None = None) -> KvBuffer:
    """A buffer of the device with bytes of its own in each layer."""
    buffer = device.buffer(LAYOUT, TOKENS)
    for layer in range(LAYOUT.num_layers):
        buffer.write(layer, TOKENS, memoryview(content(layer)))
    return buffer


def content(layer: int) -> bytes:
    return random.Random(layer).randbytes(NUM_TOKENS * LAYOUT.row_bytes)


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_what_is_written_to_a_device_is_read_from_it(device: Device) -> None:
    buffer = written(device)
    assert buffer.data.device == device.torch_device
    for layer in range(LAYOUT.num_layers):
        assert bytes(buffer.export(layer, TOKENS)) == content(layer)
    part = TokenRange(7, 9)
    assert bytes(buffer.export(1, part)) == content(1)[7 * LAYOUT.row_bytes : 9 * LAYOUT.row_bytes]


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_rows_of_a_device_and_of_home_grow_and_are_given_back(device: Device) -> None:
    for make in (device.row_memory, device.home_memory):
        memory = make(LAYOUT, 3 * NUM_TOKENS)
        for _ in range(2):
            memory.expect(NUM_TOKENS)
            memory.commit(TOKENS)
            assert memory.num_bytes >= memory.bytes_for(NUM_TOKENS) > 0
            buffer = KvBuffer.of(LAYOUT, TOKENS, memory.data_LS2GH[:, :NUM_TOKENS], memory.access)
            buffer.write(2, TOKENS, memoryview(content(2)))
            assert bytes(buffer.export(2, TOKENS)) == content(2)
            memory.release()
            assert memory.num_bytes == 0


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_copies_over_the_link_are_whole_and_counted(device: Device) -> None:
    there, home = written(device), KvBuffer(LAYOUT, TOKENS)
    fetched, stored = device.link.num_bytes_fetched, device.link.num_bytes_stored
    device.link.store([(home.span(layer, TOKENS), there.span(layer, TOKENS)) for layer in (0, 2)]).result()
    assert [bytes(home.export(layer, TOKENS)) for layer in (0, 2)] == [content(0), content(2)]
    device.link.fetch([(there.span(1, TOKENS), home.span(2, TOKENS))], after=device.link.queued()).result()
    assert bytes(there.export(1, TOKENS)) == content(2)
    layer_bytes = NUM_TOKENS * LAYOUT.row_bytes
    own = 0 if device.is_home else layer_bytes  # the last export went over the link, too
    assert device.link.num_bytes_fetched - fetched == layer_bytes
    assert device.link.num_bytes_stored - stored == 2 * layer_bytes + own


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_what_computes_behind_a_fetch_sees_it(device: Device) -> None:
    home = torch.ones(1 << 18)
    there = torch.zeros(1 << 18, device=device.torch_device)
    for value in range(1, 6):
        home.fill_(value)
        transfer = device.link.fetch([(there, home)], after=device.link.queued())
        transfer.join()
        assert float((2 * there).sum()) == 2 * value * len(home)
        transfer.wait()


@pytest.mark.parametrize("device", APART, indirect=True)
def test_the_host_cannot_read_a_devices_memory_nor_write_it(device: Device) -> None:
    there = written(device)
    with pytest.raises(WrongMemoryError):
        byte_view(there.span(0, TOKENS))


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_a_failed_copy_fails_whoever_asked_and_nobody_else(device: Device) -> None:
    there, home = written(device), KvBuffer(LAYOUT, TOKENS)
    with pytest.raises((ValueError, RuntimeError)):
        device.link.fetch([(there.span(0, TOKENS), home.span(0, TokenRange(0, 3)))], after=None).result()
    device.link.fetch([(there.span(0, TOKENS), home.span(0, TOKENS))], after=device.link.queued()).result()


@pytest.mark.parametrize("device", NAMES, indirect=True)
def test_a_link_at_rest_works_on(device: Device) -> None:
    there, home = written(device), KvBuffer(LAYOUT, TOKENS)
    device.link.rest()
    device.link.rest()
    device.link.store([(home.span(0, TOKENS), there.span(0, TOKENS))]).result()
    assert bytes(home.export(0, TOKENS)) == content(0)


# The emulated device.


def test_home_memory_is_no_memory_of_the_device() -> None:
    device = EmulatedDevice()
    home, there = KvBuffer(LAYOUT, TOKENS), device.buffer(LAYOUT, TOKENS)
    device.require(there.data.data_ptr(), NUM_TOKENS * LAYOUT.row_bytes)
    with pytest.raises(WrongMemoryError, match="are host memory: fetch them over the link first"):
        device.require(home.data.data_ptr(), 1)
    other = EmulatedDevice()
    with pytest.raises(WrongMemoryError):
        other.require(there.data.data_ptr(), 1)


def test_the_arena_counts_its_bytes_and_keeps_to_its_limit() -> None:
    device = EmulatedDevice()
    rows = [device.row_memory(LAYOUT, 100) for _ in range(2)]
    one = rows[0].bytes_for(50)
    device.bound(one + PAGE_BYTES)
    rows[0].commit(TokenRange(0, 50))
    with pytest.raises(MemoryError, match=r"exceed the device's \d+"):
        rows[1].commit(TokenRange(0, 50))
    assert rows[1].num_bytes == 0
    assert device.memory_use.num_bytes == device.memory_use.peak_bytes == one
    rows[0].release()
    rows[1].commit(TokenRange(0, 50))
    rows[1].release()
    buffer = device.buffer(LAYOUT, TokenRange(0, 10))
    assert device.memory_use.num_bytes > 0
    del buffer
    assert (device.memory_use.num_bytes, device.memory_use.peak_bytes) == (0, one)


def test_a_link_takes_as_long_as_its_rate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = StandingTime()
    monkeypatch.setattr(copying, "time", passed)
    device = EmulatedDevice(LinkRate(bytes_per_s=50e6, latency_s=2e-3))
    there, home = torch.zeros(250_000), torch.ones(250_000)
    for transfer in [device.link.fetch([(there, home)], after=device.link.queued()) for _ in range(4)]:
        transfer.wait()
    assert passed.now_s == pytest.approx(4 * (0.02 + 2e-3))
    passed.now_s = 0.0
    device.link.store([(home, there)]).wait()
    assert passed.now_s == pytest.approx(0.02 + 2e-3), "each direction has a rate of its own"
    device.link.rest()


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_a_link_that_brings_nothing_is_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(ConfigError):
        LinkRate(bytes_per_s, latency_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="device = cuda is not available: .*; .* or use cpu"):
        make_device("cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device = 'warp' is unknown: use auto, cpu, cuda or emulated"):
        make_device("warp")
