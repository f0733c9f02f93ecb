"""Leases slots for prompts whose first blocks are in the node's prefix store. These blocks are copied from the store to
the slot, instead of being received from a prefill worker.

The loader implements `baton.transport.kv_sink.KvPrefixes`. `baton.transport.kv_receiver` calls the loader, which leases
slots from `slots.table`. Blocks are opened, and thereby locked, before the lease reports them as present. They are
copied while the prefill runs. The copy writes to the slot like a push of KV (`SlotTable.open_push`). It must end before
the lease is committed.

Opening and copying a block may wait for a disk for some seconds (`baton.modeling.prefix_store.disk_tier`). Separate
threads do it, so that neither the engine's thread nor the event loop's thread pool waits. Heartbeats use that thread
pool. They report the latest known number of blocks on the disk, so that they do not wait for the disk either.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from baton.errors import LeaseError
from baton.modeling.kv.buffers import KvBuffer
from baton.modeling.prefix_store.store import Leading, PrefixStore
from baton.transport.kv_sink import ReserveSpec
from baton.types import Lease
from generate_workers.slots.table import SlotTable

logger = logging.getLogger(__name__)


_NUM_THREADS = 2
"""Number of threads that copy blocks, and also the number of threads that open blocks. More threads would not be
faster, because they share the bandwidth of memory or disk."""


class PrefixLoader:
    """Leases slots for prompts, and puts cached blocks of each prompt at the start of its slot. All methods are called
    on the asyncio loop."""

    def __init__(self, slots: SlotTable, store: PrefixStore) -> None:
        self.num_bytes_read = 0
        """Total bytes of the cached blocks that leased slots got at their start. This includes blocks that were not
        copied, because their pages are shared with other sequences."""
        self.num_disk_bytes_read = 0
        """Total bytes of cached blocks that were read from disk. They are included in `num_bytes_read`."""
        self._slots = slots
        self._store = store
        self._loads: set[asyncio.Task[None]] = set()
        self._copying = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-loader")
        self._opening = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-opener")

    async def reserve(self, request: ReserveSpec) -> Lease:
        """Lease a slot, and begin to copy the cached blocks of the request's prompt to it. The blocks used are the
        longest sequence of leading blocks that the store has. Return the lease, which has the number of tokens that
        these blocks contain. A lease for local prefill is committed when the blocks are copied.

        Raises InvalidArgumentError for an invalid block name, and the errors of `SlotTable.reserve`. If too few slots
        or too little memory is free, the error is raised before a disk is read, because the request will be retried.
        """
        self._slots.check_room(request)
        found = await self._open(request)
        lease = self._slots.reserve(request, len(found.blocks) * request.block_tokens)
        self.num_bytes_read += sum(block.num_bytes for block in found.blocks)
        self.num_disk_bytes_read += found.num_disk_bytes
        names = request.prefix_blocks[: len(found.blocks)]
        num_shared = self._slots.begin_with(lease.ref, names, request.block_tokens) if names else 0
        if num_shared < lease.num_present_tokens or request.prefills_locally:
            load = asyncio.create_task(self._load(lease, found.blocks, num_shared, request))
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        return lease

    async def close(self) -> None:
        """End the threads. Waits until running copies and disk reads have ended."""
        await asyncio.to_thread(self._opening.shutdown, cancel_futures=True)
        await asyncio.gather(*self._loads)
        self._copying.shutdown()

    async def _open(self, request: ReserveSpec) -> Leading:
        """Open the request's leading blocks on a thread. If the request names no blocks, return at once without a
        thread."""
        if not request.prefix_blocks:
            return Leading((), 0)
        opening = partial(self._store.open_leading, request.prefix_blocks, request.block_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._opening, opening)

    async def _load(self, lease: Lease, blocks: tuple[KvBuffer, ...], num_shared: int, request: ReserveSpec) -> None:
        """Copy blocks into the lease's slot, except its first `num_shared` tokens. Then commit a lease for local
        prefill. Abort the lease if a copy fails."""
        try:
            missing = tuple(block for block in blocks if block.tokens.start >= num_shared)
            if missing:
                await asyncio.get_running_loop().run_in_executor(self._copying, self._copy, lease, missing)
                names = request.prefix_blocks[: len(blocks)]
                self._slots.keep_prefix(lease.ref, names, request.block_tokens)
            if request.prefills_locally:
                self._slots.complete_locally(lease.ref)
        except LeaseError as ended:
            logger.debug("the blocks of request %s have no slot any more: %s", lease.request_id, ended)
        except Exception as error:  # noqa: BLE001 - logged without its traceback, which would hold the blocks
            what = f"the blocks of request {lease.request_id} cannot be copied"
            logger.error("%s: its lease ends (%s)", what, repr(error))
            self._slots.abort(lease.ref)

    def _copy(self, lease: Lease, blocks: tuple[KvBuffer, ...]) -> None:
        with self._slots.open_push(lease.ref) as slot:
            for block in blocks:
                for layer in range(block.layout.num_layers):
                    slot.copy_in(layer, block.tokens, block.export(layer, block.tokens))
            slot.drain()
