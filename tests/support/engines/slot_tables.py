"""Tiny slot tables for tests. They use a manual clock, and memory that is NaN until it is written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from baton.errors import LeaseExpiredError, StaleStampError
from baton.modeling.device.copying import CopyTensor, copy_bytes
from baton.modeling.device.cpu import CpuDevice
from baton.modeling.device.port import Device
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.kv.row_memory import PAGE_BYTES, PagedMemory
from baton.process.clock import Clock
from baton.transport.kv_sink import ReserveSpec
from baton.types import KvLayout, Lease, LeaseRef, RequestId, SampledToken, TokenRange
from generate_workers.residency.device import DeviceResidency
from generate_workers.residency.host import HostResidency
from generate_workers.residency.paged import PagedResidency
from generate_workers.residency.port import KvShape, Residency
from generate_workers.residency.row_parts import MakeMemory
from generate_workers.residency.steps import RowResidency
from generate_workers.slots.kv_memory import KvMemory, MemoryLimits
from generate_workers.slots.leases import BatchSlot, KvLedger, SlotLedger, SlotState
from generate_workers.slots.table import SlotTable
from tests.support.engines.devices import PoisonedCpu, PoisonedDevice

Policy = str | Callable[[KvShape, MakeMemory], Residency]
"""Name of a policy (device, host, or paged on an emulated device with pages of PAGE_TOKENS), or a function that creates
one."""
PAGE_TOKENS = 4
LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
FIRST = SampledToken(token_id=7)
UNLIMITED = MemoryLimits(1 << 40)


def make_residency(
    shape: KvShape,
    policy: Policy = "device",
    copy: CopyTensor = copy_bytes,
    *,
    poison: bool = True,
    device: Device | None = None,
) -> Residency:
    """Create a residency (memory policy). Default: on the CPU, with poisoned memory."""
    if policy == "paged":
        return PagedResidency(shape, PoisonedDevice(), page_tokens=PAGE_TOKENS)
    if device is None or device.is_home:
        device = PoisonedCpu(copy) if poison else CpuDevice(copy)
    if not isinstance(policy, str):
        return policy(shape, device.row_memory)
    if policy == "host":
        return HostResidency(shape, device)
    if device.is_home or shape.chosen_drafts:
        return DeviceResidency(shape, device.row_memory)
    return PagedResidency(shape, device)


def memories_of(memory: KvMemory) -> list[PagedMemory]:
    """Return the host memories of all slots."""
    residency = memory.residency
    assert isinstance(residency, RowResidency)
    memories = [kv.memory for row in residency._rows for kv in row._home]
    assert all(isinstance(each, PagedMemory) for each in memories)
    return [each for each in memories if isinstance(each, PagedMemory)]


def make_slots(
    clock: Clock,
    *,
    num_slots: int = 2,
    max_slot_tokens: int = 12,
    layout: KvLayout = LAYOUT,
    limits: MemoryLimits = UNLIMITED,
    growth_tokens: int = 256,
    policy: str = "device",
) -> SlotTable:
    """Create a slot table with poisoned memory."""
    shape = KvShape(layout, (None,) * layout.num_layers, num_slots, max_slot_tokens)
    memory = KvMemory(make_residency(shape, policy), shape, limits, growth_tokens)
    return SlotTable(memory, clock, endpoint="127.0.0.1:1")


def whole_pages(num_bytes: float) -> int:
    """Return `num_bytes` rounded up to whole pages, in bytes."""
    return -(-int(num_bytes) // PAGE_BYTES) * PAGE_BYTES


def page_bytes(num_tokens: int, layout: KvLayout = LAYOUT) -> int:
    """Return the bytes that a sequence of `num_tokens` tokens uses: a whole number of pages in each layer."""
    return layout.num_layers * whole_pages(num_tokens * layout.row_bytes)


def kv_ledger(leased: int = 0, active: int = 0, quarantined: int = 0, *, limits: MemoryLimits = UNLIMITED) -> KvLedger:
    """Return the expected ledger, given the bytes promised to leased, active and quarantined slots. All other bytes are
    free."""
    return KvLedger(limits.kv_bytes, limits.kv_bytes - leased - active - quarantined, leased, active, quarantined)


def make_memory(*, num_slots: int = 1, max_slot_tokens: int = 12, layout: KvLayout = LAYOUT) -> KvMemory:
    """Create KV memory on the device, without a limit."""
    shape = KvShape(layout, (None,) * layout.num_layers, num_slots, max_slot_tokens)
    return KvMemory(make_residency(shape), shape, UNLIMITED, growth_tokens=4)


def lease(slots: SlotTable, num_tokens: int = 4, capacity_tokens: int = 8, ttl_s: float = 5.0) -> Lease:
    """Reserve a slot, and return its lease."""
    return slots.reserve(ReserveSpec(RequestId("r"), 1, num_tokens, capacity_tokens, ttl_s))


def push_zeros(slots: SlotTable, ref: LeaseRef, num_tokens: int) -> None:
    """Write zeros to all KV of a lease."""
    data = memoryview(bytes(num_tokens * slots.layout.row_bytes))
    with slots.open_push(ref) as target:
        for layer in range(slots.layout.num_layers):
            target.copy_in(layer, TokenRange(0, num_tokens), data)
        target.drain()


def push_buffer(slots: SlotTable, ref: LeaseRef, buffer: KvBuffer, tokens: TokenRange) -> None:
    """Write the KV of `tokens` in another buffer to a lease."""
    with slots.open_push(ref) as target:
        for layer in range(slots.layout.num_layers):
            target.copy_in(layer, tokens, buffer.export(layer, tokens))
        target.drain()


class Standing(Enum):
    """State of a lease."""

    PENDING = "KV is still being pushed"
    READY = "committed"
    RUNNING = "its rows have joined the batch"
    EXPIRED = "not renewed in time"
    GONE = "aborted or never made"


def standing(slots: SlotTable, ref: LeaseRef) -> Standing:
    """Return the current state of a lease."""
    try:
        slots.leased_tokens(ref)
    except LeaseExpiredError:
        return Standing.EXPIRED
    except StaleStampError:
        return Standing.GONE
    state = slots._slots[ref.slot].state
    early = {SlotState.LEASED: Standing.PENDING, SlotState.COMMITTED: Standing.READY}
    return early.get(state, Standing.RUNNING)


def activated(slots: SlotTable, ref: LeaseRef) -> list[BatchSlot]:
    """Activate a committed lease, and return its batch slots."""
    batch_slots = slots.activate(ref)
    assert batch_slots is not None
    return batch_slots


@contextmanager
def ends_empty(slots: SlotTable) -> Iterator[None]:
    """Context in which resources may be held. At its end, check that nothing is held and that the ledger is
    balanced."""
    yield
    ledger = slots.ledger()
    assert not ledger.imbalance
    assert is_empty(ledger), ledger


def is_empty(ledger: SlotLedger) -> bool:
    """Return True if no slot is used and no memory is held."""
    return ledger.num_free == ledger.num_slots and ledger.num_bytes_held == ledger.num_device_bytes == 0
