"""Leases that begin with blocks of the node's prefix store: what is there is copied into the slot, and not pushed.

Steps 3 and 6 of a request's way (DESIGN.md, sections 4 and 5). A transport.kv_sink.KvPrefixes. Blocks are opened, and
so locked, before the lease says that they are present; copying goes on beside the prefill, as one more writer of the
slot: commit waits for it as for any other. Both have threads of their own: heartbeats go to the loop's pool, and never
wait for disks. The engine's thread has no part in it.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from baton.errors import LeaseError
from baton.types import Lease
from generate_workers.slots.table import SlotTable
from modeling.kv.buffers import KvBuffer
from modeling.prefix_store.store import Leading, PrefixStore
from transport.kv_sink import ReserveSpec

logger = logging.getLogger(__name__)


_NUM_THREADS = 2
"""That copy blocks, and as many that open them: more would only share the memory's bandwidth, and the steps', or the
disk's."""


class PrefixLoader:
    """Of one group's slots. On the loop."""

    def __init__(self, slots: SlotTable, store: PrefixStore) -> None:
        self.num_bytes = 0
        """That slots began with, so far."""
        self.num_disk_bytes = 0
        """Of these, from disk."""
        self._slots = slots
        self._store = store
        self._loads: set[asyncio.Task[None]] = set()
        self._copying = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-loader")
        self._opening = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prefix-opener")

    async def reserve(self, request: ReserveSpec) -> Lease:
        """As KvPrefixes says; a lease for local prefill is complete when its blocks are in. Where there is no room, no
        disk is read: the request is repeated until there is."""
        self._slots.check_room(request)
        found = await self._open(request)
        lease = self._slots.reserve(request, len(found.blocks) * request.block_tokens)
        self.num_bytes += sum(block.num_bytes for block in found.blocks)
        self.num_disk_bytes += found.num_disk_bytes
        if found.blocks or request.prefills_locally:
            load = asyncio.create_task(self._load(lease, found.blocks, request.prefills_locally))
            self._loads.add(load)
            load.add_done_callback(self._loads.discard)
        return lease

    async def close(self) -> None:
        """Returns when no block is opened and no slot is written any more: soon, or when a disk has answered."""
        await asyncio.to_thread(self._opening.shutdown, cancel_futures=True)
        await asyncio.gather(*self._loads)
        self._copying.shutdown()

    async def _open(self, request: ReserveSpec) -> Leading:
        """A lease that begins with nothing waits for nobody's disk."""
        if not request.prefix_blocks:
            return Leading((), 0)
        opening = partial(self._store.open_leading, request.prefix_blocks, request.block_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._opening, opening)

    async def _load(self, lease: Lease, blocks: tuple[KvBuffer, ...], completes: bool) -> None:
        """A lease whose blocks cannot be copied ends, as nobody else would push them."""
        try:
            if blocks:
                await asyncio.get_running_loop().run_in_executor(self._copying, self._copy, lease, blocks)
            if completes:
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
                    slot.write(layer, block.tokens, block.export(layer, block.tokens))
