"""Stores a prefill's KV in the node's prefix store, on the chain's last rank, which has the KV of all tokens.

The rows that earlier ranks computed are in memory only layer by layer (`prefill_workers.kv_pipeline`), so they are
copied at once, on the engine's thread. The rows that this rank computed stay valid as long as a view of them exists, so
they are copied after the first token was committed. Only then are the blocks sealed, that is, completed and made
readable for others; a job that fails or is cancelled stores none. In chains of several ranks, the cost before the first
token is the allocation of the blocks and one copy of the earlier ranks' rows. Finally the blocks are copied to disk, if
the node keeps blocks on disk.

Called by `prefill_workers.servicer`; writes to `baton.modeling.prefix_store.store`. Threads: the engine's thread calls
`write` and `hold`. Any thread may call `drop`, and any thread that may block calls `take`, `finish` and `sink`.
"""

import logging
import threading
from collections.abc import Sequence

from baton.errors import BatonError
from baton.modeling.prefix_store.store import BlockRoom, Filled, PrefixStore
from baton.types import TokenRange

logger = logging.getLogger(__name__)


class PrefixFilling:
    """Blocks of one job that are to be stored. They are consecutive, and begin at the token `start`, where the cached
    blocks end."""

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
        """Reserve memory in the store for as many blocks as fit. Blocks for some milliseconds. Must be called before
        the first `write`. If a job has no `write`, `finish` reserves the memory."""
        room = self._taken()
        with self._lock:
            if not self._over:
                self._room = room
                return
        room.drop()

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy the rows of `tokens` in `layer` into their blocks before returning."""
        with self._lock:
            room = self._room
        if room is not None:
            self._copy(room, layer, tokens, data)

    def hold(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Keep a view of the rows of `tokens` in `layer`, whose `data` must never change, for `finish` to copy."""
        self._held.append((layer, tokens, data))

    def finish(self) -> Filled:
        """Copy the held rows, seal the blocks, and return the names of stored and evicted blocks. Call this when all
        layers of all tokens have arrived. Returns an empty Filled after `drop`, if no block fits, or if the store
        fails. Blocks until the copies are complete."""
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
        """Copy the blocks that `finish` stored to disk, and return the names of blocks evicted to make room. Does
        nothing if the node keeps no blocks on disk. Blocks until the copies are complete."""
        try:
            return self._store.sink(stored, self._tokens(len(stored)), self._block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("a prompt is not kept on disk: %s", error)
            return []

    def drop(self) -> None:
        """Discard all blocks that `finish` has not begun to seal. Idempotent."""
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
