"""Residency policies: the same tokens wherever KV lives, under any timing, and every byte over the link counted."""

import dataclasses
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from baton.modeling.device.copying import ThreadLink, copy_bytes
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Running
from baton.modeling.forward.decoder import Decoder
from baton.modeling.kv.arena import WrongMemoryError
from baton.modeling.kv.buffers import BufferSpan, KvBuffer
from baton.modeling.kv.row_memory import PagedMemory, TensorMemory
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, KvLayout, SlotId, TokenRange
from generate_workers.config import SpeculationName
from generate_workers.residency.host import HostRow
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvBytes, KvShape
from generate_workers.residency.row_parts import Area, PagedKv
from generate_workers.slots.kv_memory import MemoryLimits
from tests.support.engines.devices import PoisonedDevice, on_emulated
from tests.support.engines.generation import WAIT_S, eos_decoder, harness, prompt, reference_ids
from tests.support.engines.slot_tables import make_residency as poisoned
from tests.support.engines.slot_tables import page_bytes, whole_pages
from tests.support.models.tiny_models import random_decoder

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LENGTHS = (1, 7, 40, 23)
DECODER = eos_decoder()
LAYOUT = DECODER.layout
CPU = torch.device("cpu")


def answers(
    policy: str,
    copy: Callable[[Tensor, Tensor], None] = copy_bytes,
    decoder: Decoder = DECODER,
    speculation: SpeculationName = "off",
) -> list[list[int]]:
    """Rows that join one after the other, of all lengths, one pushed and one of two choices."""
    with harness(decoder=decoder, policy=policy, num_slots=8, copy=copy, speculation=speculation) as made:
        streams = []
        for length in LENGTHS:
            streams.append(made.submit(prompt(length), PARAMS)[1])
            made.engine.step()
        ref = made.reserve(33, 60).ref
        made.push_and_commit(ref, prompt(33), PARAMS)
        streams.append(made.submit(prompt(33), PARAMS, ref=ref)[1])
        choices = made.submit(prompt(15), dataclasses.replace(PARAMS, n=2, temperature=1.0, seed=3))[1]
        made.run()
        streams += [choices.choice(0), choices.choice(1)]
        return [stream.token_ids for stream in streams]


SPECULATIONS: tuple[SpeculationName, ...] = ("off", "streaming", "ngram", "auto")


@pytest.mark.parametrize("speculation", SPECULATIONS)
@pytest.mark.parametrize("policy", ["device", "host"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_tokens_are_those_of_whole_forwards(device: str, policy: str, speculation: SpeculationName) -> None:
    ids = answers(policy, decoder=DECODER if device == "cpu" else on_emulated(DECODER), speculation=speculation)
    for length, got in zip((*LENGTHS, 33), ids, strict=False):
        assert got == reference_ids(DECODER, prompt(length), PARAMS)


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_choices_have_the_same_tokens_under_every_policy(speculation: SpeculationName) -> None:
    assert answers("host", speculation=speculation) == answers("device")


def test_rows_of_the_native_kernel_have_the_same_tokens_too() -> None:
    decoder = random_decoder(dtype="bfloat16", head_dim=64, num_layers=3)
    for each in (decoder, on_emulated(decoder)):
        assert answers("host", decoder=each) == answers("device", decoder=decoder)


@pytest.mark.parametrize("policy", ["device", "host"])
def test_an_emulated_device_holds_what_its_rows_are_promised(policy: str) -> None:
    device = PoisonedDevice()
    decoder = on_emulated(DECODER, device)
    with harness(decoder=decoder, policy=policy) as made:
        limit = 4 * made.slots.memory.residency.bytes_for(64).device
    device.bound(limit)
    limits = MemoryLimits(1 << 40, limit)
    with harness(decoder=decoder, policy=policy, limits=limits, growth_tokens=1, num_slots=8) as made:
        streams = [made.submit(prompt(50), PARAMS)[1] for _ in range(8)]
        made.run()
        assert all(stream.token_ids == reference_ids(DECODER, prompt(50), PARAMS) for stream in streams)
    assert 0 < device.memory_use.peak_bytes <= limit
    assert device.memory_use.num_bytes == 0


def test_rows_of_home_memory_are_no_rows_of_a_device() -> None:
    decoder = on_emulated(DECODER)
    span = BufferSpan(KvBuffer(LAYOUT, TokenRange(0, 4)), TokenRange(0, 4))
    with pytest.raises(WrongMemoryError, match="are host memory"):
        decoder.forward([1, 2, 3, 4], [span])


@pytest.mark.parametrize(("seed", "speculation"), [(0, "off"), (1, "off"), (2, "off"), (0, "streaming")])
def test_tokens_do_not_depend_on_when_copies_are_done(seed: int, speculation: SpeculationName) -> None:
    delays = random.Random(seed)
    threads: set[str] = set()

    def slow(to: Tensor, source: Tensor) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(delays.choice((0.0, 0.0, 0.001)))
        copy_bytes(to, source)
        time.sleep(delays.choice((0.0, 0.0, 0.001)))

    assert answers("host", slow, speculation=speculation) == answers("host")
    assert any(name.startswith("kv-fetch") for name in threads)


def test_the_next_layer_is_fetched_while_this_one_computes() -> None:
    """Layer 0's turn ends although layer 1 cannot be fetched yet: nobody waits for more than the layer it needs."""
    shape = KvShape(LAYOUT, DECODER.config.windows, 1, 64)
    allowed = threading.Semaphore(1)

    def gated(to: Tensor, source: Tensor) -> None:
        if threading.current_thread().name.startswith("kv-fetch"):
            assert allowed.acquire(timeout=WAIT_S)
        copy_bytes(to, source)

    residency = poisoned(shape, "host", gated)
    row = residency.open(SlotId(0), 5, 8)
    for layer in range(LAYOUT.num_layers):
        row.write(layer, TokenRange(0, 5), memoryview(bytes([layer + 1]) * (5 * LAYOUT.row_bytes))).result()
    with residency.step([(SlotId(0), TokenRange(5, 6))]) as step:
        assert step.turns is not None
        step.turns.begin(0, torch.empty(0))
        [rows] = step.spans[0].segments(0)
        assert set(rows.k_SGH[:5].reshape(-1).view(torch.uint8).tolist()) == {1}
        step.spans[0].own(0).fill_(1.5)
        step.turns.end(0)
        allowed.release()
        step.turns.begin(1, torch.empty(0))
        [rows] = step.spans[0].segments(1)
        assert set(rows.k_SGH[:5].reshape(-1).view(torch.uint8).tolist()) == {2}
        step.turns.end(1)
    assert set(torch.frombuffer(row.export(0, TokenRange(5, 6)), dtype=torch.float32).tolist()) == {1.5}
    row.release()
    residency.close()


def test_a_failed_step_waits_until_nothing_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy goes on only once somebody waits for it."""
    awaited, done = threading.Event(), threading.Event()

    def gated(to: Tensor, source: Tensor) -> None:
        assert awaited.wait(WAIT_S)
        copy_bytes(to, source)
        done.set()

    def wait_for(transfer: Running) -> None:
        awaited.set()
        wait(transfer)

    wait = Running.wait
    monkeypatch.setattr(Running, "wait", wait_for)
    residency = poisoned(KvShape(LAYOUT, DECODER.config.windows, 1, 64), "host", gated)
    row = residency.open(SlotId(0), 5, 8)
    for layer in range(LAYOUT.num_layers):
        row.write(layer, TokenRange(0, 5), memoryview(bytes(5 * LAYOUT.row_bytes))).result()
    with pytest.raises(RuntimeError, match="device lost"), residency.step([(SlotId(0), TokenRange(5, 6))]):
        raise RuntimeError("device lost")
    assert done.is_set()
    row.release()
    residency.close()


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_a_copy_that_fails_fails_the_step_and_nothing_else(speculation: SpeculationName) -> None:
    def broken(to: Tensor, source: Tensor) -> None:
        if fails:
            raise RuntimeError("the link is down")
        copy_bytes(to, source)

    fails = False
    with harness(decoder=DECODER, policy="host", copy=broken, speculation=speculation) as made:
        stream = made.submit(prompt(9), PARAMS)[1]
        made.engine.step()
        fails = True
        made.engine.step()
        assert (stream.finish, stream.error) == (FinishReason.ERROR, "RuntimeError: the link is down")
        fails = False
        assert made.answer(prompt(9), PARAMS).token_ids == reference_ids(DECODER, prompt(9), PARAMS)


def test_bytes_over_the_link_are_those_of_the_formula() -> None:
    copied: list[int] = []

    def counted(to: Tensor, source: Tensor) -> None:
        copied.append(source.nbytes)
        copy_bytes(to, source)

    with harness(decoder=DECODER, policy="host", copy=counted, max_batched_tokens=64) as made:
        for length in LENGTHS:
            made.submit(prompt(length), PARAMS)
        made.engine.step()  # 64 tokens of prefill: not all of them yet
        made.engine.step()
        before = sum(copied)
        made.engine.step()
        stats = made.engine.status().last_step
        assert stats is not None
        cached = sum(LENGTHS) + len(LENGTHS) - 1  # the last prompt was only just prefilled
        fetched = LAYOUT.num_layers * cached * LAYOUT.row_bytes
        stored = LAYOUT.num_layers * len(LENGTHS) * LAYOUT.row_bytes
        assert stats.num_decode_rows == len(LENGTHS)
        assert sum(copied) - before == stats.num_link_bytes == fetched + stored
        assert stats.num_kv_bytes == fetched + stored  # read: the old rows and the new
        assert stats.num_weight_bytes > 0
        made.run()


def test_nothing_goes_over_the_link_when_kv_lives_on_the_device() -> None:
    with harness(decoder=DECODER) as made:
        made.answer(prompt(9), PARAMS)
        stats = made.engine.status().last_step
        assert stats is not None
        assert (stats.num_link_bytes, stats.num_kv_bytes) == (0, 20 * LAYOUT.token_bytes)
        assert stats.num_bytes == stats.num_kv_bytes + stats.num_weight_bytes


def test_the_device_holds_two_layers_of_each_row() -> None:
    with harness(decoder=DECODER, policy="host") as made:
        for length in LENGTHS:
            made.submit(prompt(length), dataclasses.replace(PARAMS, max_tokens=4))
        for _ in range(5):
            made.engine.step()
        two_layers = dataclasses.replace(LAYOUT, num_layers=2)
        ledger = made.slots.ledger()
        held = [page_bytes(len(row.token_ids) - 1, two_layers) for row in made.engine._running.rows.values()]
        assert (ledger.num_device_bytes, len(held) > 0) == (sum(held), True)
        made.run()


# What fits.


def device_limit(num_tokens: int, num_layers: int) -> MemoryLimits:
    return MemoryLimits(1 << 40, num_layers * whole_pages(num_tokens * LAYOUT.row_bytes))


def deep_decoder_layout() -> KvLayout:
    return dataclasses.replace(LAYOUT, num_layers=30)


@pytest.mark.parametrize(("policy", "device_layers"), [("device", 30), ("host", 2)])
def test_what_a_row_takes_of_the_device(policy: str, device_layers: int) -> None:
    layout = deep_decoder_layout()
    residency = make_residency(policy, KvShape(layout, (None,) * 30, 2, 100), CpuDevice())
    page_rows = whole_pages(50 * layout.row_bytes)
    assert residency.bytes_for(50) == KvBytes(30 * page_rows, device_layers * page_rows)
    assert (residency.traits.is_exact, residency.traits.name) == (True, policy)
    residency.close()


def test_device_refuses_what_its_budget_does_not_hold_and_names_the_remedy() -> None:
    with harness(decoder=DECODER, limits=device_limit(48, LAYOUT.num_layers), growth_tokens=1) as made:
        with pytest.raises(InvalidArgumentError, match=r"device_memory_bytes leaves \d+ for KV: .* residency = host"):
            made.submit(prompt(40), PARAMS)
        ref = made.reserve(30, 40).ref
        with pytest.raises(ResourceExhaustedError, match="device_memory_bytes leaves"):
            made.reserve(30, 40)
        made.slots.abort(ref)


def test_an_unknown_policy_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="residency = 'h2o' is unknown: use one of device, host, "):
        make_residency("h2o", KvShape(LAYOUT, (None, None), 1, 8), CpuDevice())


def test_address_space_that_cannot_be_had_is_a_config_error() -> None:
    shape = KvShape(dataclasses.replace(LAYOUT, num_layers=2), (None, None), 2, 1 << 42)
    with pytest.raises(ConfigError, match="address space for 2 slots"):
        make_residency("device", shape, CpuDevice())


def test_windows_bound_what_attention_reads() -> None:
    shape = KvShape(LAYOUT, (None, 10), 1, 100)
    assert shape.bytes_read([TokenRange(49, 50)]) == (50 + 10) * LAYOUT.row_bytes
    assert shape.bytes_read([TokenRange(40, 50)]) == (50 + 19) * LAYOUT.row_bytes
    assert shape.bytes_read([TokenRange(4, 5), TokenRange(0, 3)]) == (5 + 5 + 3 + 3) * LAYOUT.row_bytes


def test_a_link_at_rest_has_no_thread() -> None:
    link = ThreadLink()
    link.fetch([(torch.zeros(4), torch.ones(4))], after=None).result()
    link.rest()
    link.rest()
    assert not any(thread.name.startswith("kv-fetch") for thread in threading.enumerate())


def test_a_row_whose_area_cannot_be_had_holds_no_home_memory() -> None:
    class FullMemory(PagedMemory):
        def expect(self, num_tokens: int) -> None:
            raise MemoryError("full")

    layout = dataclasses.replace(LAYOUT, num_kv_heads=2, head_dim=128)
    home = PagedKv(layout, lambda layout, most: TensorMemory(layout, most, CPU), 64)
    row = HostRow(home, Area(dataclasses.replace(layout, num_layers=2), FullMemory, 64))
    with pytest.raises(MemoryError, match="full"):
        row.open(8, 16)
    assert home.num_bytes == 0
