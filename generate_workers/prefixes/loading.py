"""Leases that begin with blocks of the node's prefix store, which are copied into the slot instead of pushed.

The loader is a baton.transport.kv_sink.KvPrefixes, called by `baton.transport.kv_receiver`; it leases from
`slots.table`. Blocks are opened, and so locked, before the lease reports them as present. They are copied while the
prefill runs, by a writer of the slot; the commit waits for this writer as for any other. Opening and copying have their
own threads, which wait for a disk for some seconds at most (`baton.modeling.prefix_store.disk_tier`). They do not block
the engine's thread. Nor do they block heartbeats, which use the loop's thread pool and report the latest known count of
blocks on disk.
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
"""Number of threads that copy blocks, and number of other threads that open blocks. More threads would share the same
bandwidth of memory or disk."""


class PrefixLoader:
    """Leases slots that begin with cached blocks of their prompts. Used on the asyncio loop."""

    def __init__(self, slots: SlotTable, store: PrefixStore) -> None:
        self.num_bytes_read = 0
        """Total bytes of cached blocks with which slots have begun, including blocks in pages shared with other
        sequences."""
        self.num_disk_bytes_read = 0
        """Part of `num_bytes_read` that was read from disk."""
        self._slots = slots
        self._store = store
        self._loads: set[asyncio.Task[None]] = set()
        self._copying = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-loader")
        self._opening = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-opener")

    async def reserve(self, request: ReserveSpec) -> Lease:
        """Open the longest leading run of the request's blocks, lease a slot, and begin to copy them. Return the lease,
        which has the number of tokens that are present. A lease for local prefill is committed when its blocks are in
        place. Raises InvalidArgumentError for a bad block name, and the errors of `SlotTable.reserve`. If too few slots
        or too little memory is free, it raises before it reads a disk, because the request will be retried."""
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
        """End the threads. Waits for running copies and disk reads."""
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
