"""Pushed KV that arrives while a step computes: it lands at the rate of the link, where no step uses memory."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from baton.errors import TransferError
from baton.modeling.device import copying
from baton.modeling.device.copying import UNBOUND, LinkRate
from baton.modeling.forward.attention import default_kernel
from baton.modeling.forward.decoder import Decoder
from baton.sampling_params import SamplingParams
from baton.types import LeaseRef, SampledToken, SlotId, TokenRange
from generate_workers.residency.paged import PagedResidency, PagedRow
from generate_workers.residency.port import KvShape
from generate_workers.slots.kv_memory import KvMemory
from generate_workers.slots.table import SlotTable
from tests.support.engines.gated_devices import SteppedLink, stepped_device
from tests.support.engines.gated_kernels import Gate
from tests.support.engines.generation import WAIT_S, eos_decoder, harness, prefilled, prompt, reference_ids
from tests.support.engines.slot_tables import FIRST, LAYOUT, UNLIMITED, activated, ends_empty, lease, push_buffer
from tests.support.manual_clock import ManualClock, StandingTime

pytestmark = pytest.mark.integration

NUM_FRAMES = 6
FRAME_TOKENS = 2
MOST = 12
RATE = LinkRate(bytes_per_s=1e3)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
Make = Callable[[LinkRate], "Stepped"]


@dataclass
class Stepped:
    """A table of three slots, whose pages have four tokens, on a device whose compute stream the test occupies."""

    link: SteppedLink
    residency: PagedResidency
    slots: SlotTable

    @classmethod
    def of(cls, rate: LinkRate) -> "Stepped":
        link = SteppedLink(rate)
        shape = KvShape(LAYOUT, (None,) * LAYOUT.num_layers, num_slots=3, max_slot_tokens=MOST)
        device = stepped_device(link, NUM_FRAMES, FRAME_TOKENS * LAYOUT.row_bytes)
        residency = PagedResidency(shape, device, page_tokens=4)
        memory = KvMemory(residency, shape, UNLIMITED, 4)
        return cls(link, residency, SlotTable(memory, ManualClock(100.0), endpoint="127.0.0.1:1"))

    async def push(self, ref: LeaseRef, tokens: TokenRange) -> None:
        """Push the KV of `tokens` in all layers, in pieces of one frame, and wait until it has landed."""
        with self.slots.open_push(ref) as target:
            for layer in range(LAYOUT.num_layers):
                for piece in tokens.split(FRAME_TOKENS):
                    await asyncio.wait_for(target.write(layer, piece, rows(piece, layer)), WAIT_S)
            await asyncio.wait_for(target.settle(), WAIT_S)

    def check(self, ref: LeaseRef, tokens: TokenRange) -> None:
        """Check that a committed lease has the KV that `push` pushes, and release its slot."""
        [batch_slot] = activated(self.slots, ref)
        for layer in range(LAYOUT.num_layers):
            assert bytes(batch_slot.row.export(layer, tokens)) == bytes(rows(tokens, layer))
        self.slots.release(ref)


def rows(tokens: TokenRange, layer: int) -> memoryview:
    """Bytes that differ by layer and position."""
    start = tokens.start * LAYOUT.row_bytes
    return memoryview(bytes((layer * 100 + start + at) % 251 for at in range(len(tokens) * LAYOUT.row_bytes)))


@pytest.fixture
def make() -> Iterator[Make]:
    """Function that creates tables. At the end, all their frames and slots must be free."""
    made = list[Stepped]()

    def create(rate: LinkRate = UNBOUND) -> Stepped:
        made.append(Stepped.of(rate))
        return made[-1]

    yield create
    for each in made:
        each.link.may_return.set()
        if each.link.is_computing:
            each.link.end_step()
        each.slots.rest()
        with ends_empty(each.slots):
            assert each.residency.frames is not None
            assert each.residency.frames.num_free == NUM_FRAMES
        each.residency.close()


# Pushes do not wait for steps.


async def test_pushes_arrive_at_the_rate_of_the_link_next_to_a_long_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = StandingTime()
    monkeypatch.setattr(copying, "time", passed)
    made, tokens = make(RATE), TokenRange(0, MOST)
    assert 2 * MOST // FRAME_TOKENS > NUM_FRAMES, "the frames are reused"
    made.link.begin_step()
    ref = lease(made.slots, MOST, MOST).ref
    await made.push(ref, tokens)
    await asyncio.wait_for(made.slots.commit(ref, [FIRST]), WAIT_S)
    assert all(made.link.copied)
    assert passed.now_s == pytest.approx(MOST * LAYOUT.token_bytes / RATE.bytes_per_s)
    made.link.end_step()
    made.check(ref, tokens)


def test_tokens_are_equal_if_pushes_land_during_steps() -> None:
    cpu, link = eos_decoder(), SteppedLink()
    gate = Gate(default_kernel(cpu.weights.device, cpu.dtype))
    device = stepped_device(link, 2, 4096)
    decoder, prompts = Decoder(cpu.config, cpu.weights, gate, device=device), [prompt(40), prompt(30, seed=1)]
    with harness(decoder=decoder) as made:
        streams = [made.submit(prompts[0], PARAMS)[1]]
        for _ in range(5):
            made.engine.step()
        for _ in range(2):  # the second push is into pages that the first one's sequence has released
            buffer, logits_TV = prefilled(cpu, prompts[1])
            gate.shut(num_passes=1)
            link.begin_step()
            step = threading.Thread(target=made.engine.step)
            step.start()
            assert gate.reached.wait(WAIT_S)
            ref = made.reserve(30, 60).ref
            push_buffer(made.slots, ref, buffer, buffer.tokens)
            made.commit(ref, SampledToken(int(logits_TV[-1].argmax())))
            assert link.is_computing
            gate.open()
            link.end_step()
            step.join()
            streams.append(made.submit(prompts[1], PARAMS, ref=ref)[1])
            made.run(streams[-1])
            streams.append(made.submit(prompts[0], PARAMS)[1])
            made.engine.step()
        made.run()
        for stream, ids in zip(streams, [prompts[0], *[prompts[1], prompts[0]] * 2], strict=True):
            assert stream.token_ids == reference_ids(cpu, ids, PARAMS)


# What does wait.


def opened(residency: PagedResidency, slot: int, num_tokens: int) -> PagedRow:
    return residency.open(SlotId(slot), num_tokens, MOST)


def test_a_page_is_not_overwritten_before_the_step_in_which_it_was_released_has_ended(make: Make) -> None:
    made = make(UNBOUND)
    first, tokens = opened(made.residency, 0, 4), TokenRange(0, 4)
    first.write(0, tokens, rows(tokens, 0)).result()
    made.link.begin_step()
    pages = first.pages.pages_of(tokens)
    first.release()
    second = opened(made.residency, 1, 4)
    copying = second.write(0, tokens, rows(tokens, 0))
    assert second.pages.pages_of(tokens) == pages
    made.link.end_step()
    copying.result()
    assert made.link.waits == [False, True]
    made.link.begin_step()
    second.write(1, tokens, rows(tokens, 1)).result()  # its page is its own by now
    made.link.end_step()
    assert made.link.copied == [False, False, True]
    assert bytes(second.export(1, tokens)) == bytes(rows(tokens, 1))
    second.release()


def test_a_push_into_a_copy_of_a_shared_page_comes_after_the_copy(make: Make) -> None:
    made = make(UNBOUND)
    first, second = opened(made.residency, 0, 6), opened(made.residency, 1, 8)
    tokens, later = TokenRange(0, 6), TokenRange(6, 8)
    for layer in range(LAYOUT.num_layers):
        first.write(layer, tokens, rows(tokens, layer)).result()
    second.copy_from(first, 6)
    made.link.begin_step()
    copying = second.write(0, later, rows(later, 0))
    made.link.end_step()
    copying.result()
    assert made.link.waits[-1] and not made.link.copied[-1]
    assert bytes(second.export(0, TokenRange(0, 8))) == bytes(rows(TokenRange(0, 8), 0))
    assert bytes(first.export(0, tokens)) == bytes(rows(tokens, 0))
    first.release()
    second.release()


def test_fetches_of_residency_host_come_after_what_is_queued() -> None:
    cpu, link = eos_decoder(), SteppedLink()
    decoder = Decoder(cpu.config, cpu.weights, device=stepped_device(link, 2, 4096))
    with harness(decoder=decoder, policy="host") as made:
        assert made.answer(prompt(20), PARAMS).token_ids == reference_ids(cpu, prompt(20), PARAMS)
    assert link.fetches
    assert all(after is not None for _, after in link.fetches)


# Queued pieces of a lease land together.


async def queued_pieces(made: Stepped) -> tuple[list[LeaseRef], "list[asyncio.Task[None]]"]:
    """Queue two pieces of each of two leases while the upload thread begins another piece of the first lease. Return
    the leases, and tasks that end when their pieces have landed."""
    refs, pieces = [lease(made.slots).ref for _ in range(2)], TokenRange(0, 4).split(FRAME_TOKENS)
    made.link.may_return.clear()
    queued = asyncio.Semaphore(0)

    async def push(ref: LeaseRef, layer: int) -> None:
        with made.slots.open_push(ref) as target:
            for piece in pieces if layer else pieces[:1]:
                await target.write(layer, piece, rows(piece, layer))
                queued.release()
            await target.settle()

    tasks = [asyncio.create_task(push(refs[0], 0))]
    assert await asyncio.to_thread(made.link.entered.acquire, timeout=WAIT_S)
    tasks += [asyncio.create_task(push(ref, 1)) for ref in refs]
    async with asyncio.timeout(WAIT_S):
        for _ in range(5):
            await queued.acquire()
    return refs, tasks


async def test_queued_pieces_of_a_lease_are_copied_by_one_call(make: Make) -> None:
    made = make(UNBOUND)
    refs, tasks = await queued_pieces(made)
    made.link.may_return.set()
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    assert [num_copies for num_copies, _ in made.link.fetches] == [1, 2, 2]
    for ref in refs:
        row = made.slots._slots[ref.slot].claim
        assert row is not None
        assert bytes(row.memory.row.export(1, TokenRange(0, 4))) == bytes(rows(TokenRange(0, 4), 1))
        made.slots.abort(ref)


async def test_a_call_that_fails_ends_its_lease_and_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(UNBOUND)
    refs, tasks = await queued_pieces(made)
    row = made.slots._slots[refs[0].slot].claim
    assert row is not None

    def fail(pieces: object) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(row.memory.row, "write_all", fail)
    made.link.may_return.set()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    assert [isinstance(each, TransferError) for each in ended] == [False, True, False]
    assert "layer 1, tokens [0, 2) of slot 0 could not be copied to the device" in str(ended[1])
    await made.push(refs[1], TokenRange(0, 4))
    await asyncio.wait_for(made.slots.commit(refs[1], [FIRST]), WAIT_S)
    made.check(refs[1], TokenRange(0, 4))
