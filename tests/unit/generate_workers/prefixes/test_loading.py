"""Leases that begin with a node's blocks: what is there is right to the byte, what is missing is pushed or computed."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.errors import InvalidArgumentError, LeaseError, ResourceExhaustedError, StaleStampError
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import Leading, PrefixStore
from baton.transport.kv_sink import ReserveSpec
from baton.types import Lease, RequestId, TokenRange
from generate_workers.prefixes.loading import PrefixLoader
from generate_workers.residency.paged import PagedResidency, PagedRow
from generate_workers.slots.table import SlotTable
from tests.support.engines.generation import WAIT_S
from tests.support.engines.prefixes import blocks_in, keep, mapped, store_in
from tests.support.engines.slot_tables import (
    FIRST,
    LAYOUT,
    Standing,
    activated,
    ends_empty,
    is_empty,
    make_slots,
    push_buffer,
    standing,
)
from tests.support.eventually import eventually
from tests.support.manual_clock import ManualClock

BLOCK = 4
NAMES = ("a", "b", "c")
NUM_TOKENS = 14
SPEC = ReserveSpec(RequestId("r"), 1, NUM_TOKENS, 20, 5.0, prefix_blocks=NAMES, block_tokens=BLOCK)
LOCAL = replace(SPEC, prefills_locally=True)


@pytest.fixture
def store(folder: Path) -> PrefixStore:
    return store_in(folder, LAYOUT)


@pytest.fixture(params=["device", "host", "paged"])
def slots(request: pytest.FixtureRequest) -> Iterator[SlotTable]:
    table = make_slots(ManualClock(100.0), num_slots=2, max_slot_tokens=20, policy=request.param)
    with ends_empty(table):
        yield table
        table.rest()  # pieces of a lease that has ended may be on their way to the device, and keep its slot
    table.memory.residency.close()


def kv() -> KvBuffer:
    """KV of the whole prompt; no two values are alike."""
    made = KvBuffer(LAYOUT, TokenRange(0, NUM_TOKENS))
    made.data.copy_(torch.arange(made.data.numel()).view(made.data.shape))
    return made


def stock(store: PrefixStore, names: Sequence[str] = NAMES) -> None:
    whole = kv()
    for name in names:
        start = NAMES.index(name) * BLOCK
        block = KvBuffer(LAYOUT, TokenRange(start, start + BLOCK))
        block.copy_from(whole, block.tokens) if not start else block.data.copy_(whole.data[:, start : start + BLOCK])
        keep(store, block, [name])


def check(slots: SlotTable, lease: Lease, num_tokens: int) -> None:
    """The row has the prompt's KV; and leaves."""
    whole = kv()
    [batch_slot] = activated(slots, lease.ref)
    assert batch_slot.num_cached == num_tokens
    for layer in range(LAYOUT.num_layers):
        tokens = TokenRange(0, num_tokens)
        if num_tokens:
            assert batch_slot.row.export(layer, tokens) == whole.export(layer, tokens)
    slots.release(lease.ref)


@pytest.mark.parametrize(("there", "num_present"), [("abc", 12), ("ab", 8), ("ac", 4), ("bc", 0), ("", 0)])
async def test_what_is_missing_is_pushed(slots: SlotTable, store: PrefixStore, there: str, num_present: int) -> None:
    stock(store, tuple(there))
    loader = PrefixLoader(slots, store)
    lease = await loader.reserve(SPEC)
    assert lease.num_present_tokens == num_present
    push_buffer(slots, lease.ref, kv(), TokenRange(num_present, NUM_TOKENS))
    assert await slots.commit(lease.ref, [FIRST], wait_s=10) == NUM_TOKENS * LAYOUT.token_bytes
    await loader.close()
    check(slots, lease, NUM_TOKENS)
    assert loader.num_bytes_read == num_present * LAYOUT.token_bytes


@pytest.mark.parametrize(("there", "num_present"), [("abc", 12), ("a", 4), ("", 0)])
async def test_a_local_prefill_begins_behind_what_is_there(
    slots: SlotTable, store: PrefixStore, there: str, num_present: int
) -> None:
    stock(store, tuple(there))
    loader = PrefixLoader(slots, store)
    lease = await loader.reserve(LOCAL)
    assert (lease.num_present_tokens, slots.leased_tokens(lease.ref)) == (num_present, NUM_TOKENS)
    await loader.close()
    assert standing(slots, lease.ref) is Standing.READY
    with pytest.raises(LeaseError, match="prefilled by its own stream"):
        await slots.commit(lease.ref, [FIRST])
    check(slots, lease, num_present)


async def shared_lease(slots: SlotTable, store: PrefixStore, spec: ReserveSpec) -> Lease:
    """A lease whose blocks are in, and whose other tokens are, too, unless it prefills them itself."""
    loader = PrefixLoader(slots, store)
    lease = await loader.reserve(spec)
    if not spec.prefills_locally:
        push_buffer(slots, lease.ref, kv(), TokenRange(lease.num_present_tokens, NUM_TOKENS))
        await slots.commit(lease.ref, [FIRST], wait_s=10)
    await loader.close()
    return lease


async def test_blocks_that_the_device_has_are_shared_and_not_copied_again(store: PrefixStore) -> None:
    slots = make_slots(ManualClock(100.0), num_slots=2, max_slot_tokens=20, policy="paged")
    residency = slots.memory.residency
    assert isinstance(residency, PagedResidency)
    stock(store)
    first = await shared_lease(slots, store, replace(SPEC, prefix_blocks=NAMES[:2]))
    assert (residency.pool.num_taken, residency.prefixes.num_shared_blocks) == (4, 0)
    second = await shared_lease(slots, store, SPEC)  # its third block is copied
    assert (residency.pool.num_taken, residency.prefixes.num_shared_blocks) == (4 + 2, 2)
    check(slots, first, NUM_TOKENS)
    assert residency.pool.num_taken == 4
    third = await shared_lease(slots, store, LOCAL)  # all that is there is shared
    assert (residency.pool.num_taken, residency.prefixes.num_shared_blocks) == (4, 2 + 3)
    check(slots, second, NUM_TOKENS)
    check(slots, third, 12)
    assert is_empty(slots.ledger())
    assert residency.pool.num_taken == 3  # for prompts to come
    slots.rest()
    residency.close()
    assert residency.pool.num_taken == 0


async def test_what_is_there_is_not_to_be_pushed_again(slots: SlotTable, store: PrefixStore) -> None:
    stock(store)
    loader = PrefixLoader(slots, store)
    lease = await loader.reserve(SPEC)
    await loader.close()
    with slots.open_push(lease.ref) as target:
        rows = kv().export(0, TokenRange(0, BLOCK))
        assert not target.copy_in(0, TokenRange(0, BLOCK), rows)
    slots.abort(lease.ref)


async def test_a_lease_that_ends_lets_go_of_its_blocks(slots: SlotTable, store: PrefixStore, folder: Path) -> None:
    stock(store)
    loader = PrefixLoader(slots, store)
    lease = await loader.reserve(SPEC)
    slots.abort(lease.ref)
    await loader.close()
    with pytest.raises(StaleStampError):
        await slots.commit(lease.ref, [FIRST])
    assert is_empty(slots.ledger())
    await eventually(lambda: asyncio.to_thread(mapped, folder), lambda left: not left, WAIT_S)


async def test_without_a_free_slot_no_block_is_opened(
    slots: SlotTable, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock(store)
    loader = PrefixLoader(slots, store)
    leases = [await loader.reserve(SPEC) for _ in range(2)]
    opened: list[Sequence[str]] = []
    monkeypatch.setattr(store, "open_leading", lambda names, _: opened.append(names))
    with pytest.raises(ResourceExhaustedError, match="fewer than 1 of 2 slots are free"):
        await loader.reserve(SPEC)
    assert not opened
    for lease in leases:
        slots.abort(lease.ref)
    await loader.close()


async def test_a_slot_that_goes_while_blocks_are_opened_keeps_none_open(
    slots: SlotTable, store: PrefixStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock(store)
    loader = PrefixLoader(slots, store)
    leases = [await loader.reserve(SPEC) for _ in range(2)]
    monkeypatch.setattr(slots, "check_room", lambda _: None)  # there was room then
    with pytest.raises(ResourceExhaustedError):
        await loader.reserve(SPEC)
    for lease in leases:
        slots.abort(lease.ref)
    await loader.close()
    await eventually(lambda: asyncio.to_thread(mapped, folder), lambda left: not left, WAIT_S)
    assert blocks_in(folder) == set(NAMES)


async def test_blocks_that_are_long_in_copying_keep_no_thread_from_others(
    slots: SlotTable, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert opened.wait(2 * WAIT_S)

    stock(store)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    loader = PrefixLoader(slots, store)
    monkeypatch.setattr(loader, "_copy", wait)
    lease = await loader.reserve(SPEC)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(begun.wait)
            assert (await asyncio.to_thread(store.holdings)).num_blocks == len(NAMES)
    finally:
        opened.set()
    await loader.close()
    slots.abort(lease.ref)


async def test_a_disk_that_is_long_in_answering_keeps_no_thread_from_others(
    slots: SlotTable, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, opened, open_leading = threading.Event(), threading.Event(), store.open_leading

    async def has_begun() -> bool:
        return begun.is_set()

    def wait(names: Sequence[str], block_tokens: int) -> Leading:
        begun.set()
        assert opened.wait(2 * WAIT_S)
        return open_leading(names, block_tokens)

    stock(store)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    loader = PrefixLoader(slots, store)
    monkeypatch.setattr(store, "open_leading", wait)
    reserving = [asyncio.create_task(loader.reserve(SPEC)) for _ in range(2)]
    try:
        async with asyncio.timeout(WAIT_S):
            await eventually(has_begun, bool, WAIT_S)
            assert (await asyncio.to_thread(store.holdings)).num_blocks == len(NAMES)
            nothing = await loader.reserve(replace(LOCAL, prefix_blocks=()))  # waits for no disk either
            slots.abort(nothing.ref)
    finally:
        opened.set()
    for lease in await asyncio.gather(*reserving):
        slots.abort(lease.ref)
    await loader.close()


async def test_an_invalid_block_name_is_refused(slots: SlotTable, store: PrefixStore) -> None:
    loader = PrefixLoader(slots, store)
    with pytest.raises(InvalidArgumentError, match="is not valid"):
        await loader.reserve(replace(SPEC, prefix_blocks=("../x",)))
    await loader.close()


async def test_blocks_that_cannot_be_copied_end_their_lease(
    slots: SlotTable, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    stock(store)
    loader = PrefixLoader(slots, store)
    for row in slots.memory.residency._rows:  # type: ignore[attr-defined]
        monkeypatch.setattr(row, "write_all" if isinstance(row, PagedRow) else "write", fail)
    lease = await loader.reserve(SPEC)
    await loader.close()
    with pytest.raises(StaleStampError):
        await slots.commit(lease.ref, [FIRST])
