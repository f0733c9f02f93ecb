"""Stores the KV of a prefill in the node's prefix store. Runs on the chain's last rank, which has the KV of all tokens.

KV that earlier ranks computed is freed layer by layer (`prefill_workers.kv_pipeline`), so it is copied immediately, on
the engine's thread. KV that this rank computed stays valid as long as a memoryview of it exists. It is copied later,
after the first token was committed. Then the blocks are sealed, that is, completed and made readable for others. A job
that fails or is cancelled stores no blocks. In chains of several ranks, only two costs occur before the first token:
the allocation of the blocks, and one copy of the earlier ranks' KV. Finally, the blocks are copied to disk, if the node
keeps blocks on disk.

Called by `prefill_workers.servicer`; writes to `baton.modeling.prefix_store.store`. The engine's thread calls `write`
and `hold`. `drop` may be called on any thread. `take`, `finish` and `sink` may block, so they must be called on threads
that are allowed to block (`prefill_workers.block_threads`).
"""

import logging
import threading
from collections.abc import Sequence

from baton.errors import BatonError
from baton.modeling.prefix_store.store import BlockRoom, Filled, PrefixStore
from baton.types import TokenRange

logger = logging.getLogger(__name__)


class PrefixFilling:
    """Writes the new KV blocks of one job to the prefix store. The blocks are consecutive, and begin at the token
    `start`, after the blocks that are already cached."""

    def __init__(self, store: PrefixStore, names: Sequence[str], start: int, block_tokens: int) -> None:
        self._store = store
        self._names = tuple(names)
        self._start = start
        self._block_tokens = block_tokens
        self._row_bytes = store.layout.row_bytes
        self._lock = threading.Lock()
        self._room: BlockRoom | None = None
        self._over = False
        self._held: list[tuple[int, TokenRange, memoryview]] = []

    def take(self) -> None:
        """Reserve memory in the prefix store for as many of the blocks as fit. May block for some milliseconds. Must be
        called before the first `write`. If `write` is never called, this call may be omitted, because `finish` then
        reserves the memory."""
        room = self._taken()
        with self._lock:
            if not self._over:
                self._room = room
                return
        room.drop()

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy `data`, the KV of `tokens` in `layer`, into the blocks. `data` may be reused after the call."""
        with self._lock:
            room = self._room
        if room is not None:
            self._copy(room, layer, tokens, data)

    def hold(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Keep `data`, a view of the KV of `tokens` in `layer`, which `finish` will copy. The memory of `data` must not
        change before this copy."""
        self._held.append((layer, tokens, data))

    def finish(self) -> Filled:
        """Copy the KV that was passed to `hold`, make the blocks readable for others, and return the names of stored
        and evicted blocks. Call it when all layers of all tokens have arrived. Blocks until the copies are complete.

        Returns an empty Filled if `drop` was called, if no block fits into the store, or if the store fails.
        """
        with self._lock:
            if self._over:
                return Filled()
            self._over = True  # now this call owns the reserved memory
            room, self._room = self._room, None
            held, self._held = self._held, []
        room = room or self._taken()
        try:
            for piece in held:
                self._copy(room, *piece)
            room.seal()
            return room.filled(self._names)
        except (BatonError, OSError) as error:  # the folder was removed
            logger.warning("nothing is kept of a prompt: %s", error)
            return Filled()
        finally:
            room.drop()

    def sink(self, stored: Sequence[str]) -> list[str]:
        """Copy blocks from memory to the store on disk, which may evict other blocks to make room. Return the names of
        those evicted blocks that are not in memory either. `stored` are the names of the blocks that `finish` has
        stored. Does nothing if the node keeps no blocks on disk. Waits until the copies are complete."""
        try:
            return self._store.sink(stored, self._tokens(len(stored)), self._block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("a prompt is not kept on disk: %s", error)
            return []

    def drop(self) -> None:
        """Discard all blocks, unless `finish` has already begun to store them. Idempotent."""
        with self._lock:
            self._over = True
            room, self._room = self._room, None
            self._held = []
        if room is not None:
            room.drop()

    def _taken(self) -> BlockRoom:
        """Reserve memory for the blocks and return it. It is empty if the folder was removed or the disk fails, so that
        the job does not fail."""
        try:
            return self._store.take(self._names, self._tokens(len(self._names)), self._block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("nothing is kept of a prompt: %s", error)
            return BlockRoom(self._store.locked)

    def _tokens(self, num_blocks: int) -> TokenRange:
        return TokenRange(self._start, self._start + num_blocks * self._block_tokens)

    def _copy(self, room: BlockRoom, layer: int, tokens: TokenRange, data: memoryview) -> None:
        for writer in room.writers:
            start, end = max(tokens.start, writer.tokens.start), min(tokens.end, writer.tokens.end)
            if start < end:
                rows = slice((start - tokens.start) * self._row_bytes, (end - tokens.start) * self._row_bytes)
                writer.write(layer, TokenRange(start, end), data[rows])
