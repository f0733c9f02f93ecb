"""Fills the node's prefix store from a finished prefill, on its chain's last rank, which sees the KV of all tokens.

The rows that earlier ranks computed are in memory only layer by layer (`prefill_workers.kv_pipeline`), so they are
copied at once, on the engine's thread. The rows that this rank computed stay valid as long as a view of them exists, so
they are copied after the first token was committed. Only then are the blocks sealed; a job that fails or is cancelled
leaves none. In chains of several ranks, the cost before the first token is room for the blocks and one copy of the
earlier ranks' rows. The blocks are then copied to disk, if the node has a disk for them.

Called by `prefill_workers.servicer`; writes to `baton.modeling.prefix_store.store`. `write` and `hold` run on the
engine's thread, `take`, `finish` and `sink` on any thread that may wait, `drop` on any thread.
"""

import logging
import threading
from collections.abc import Sequence

from baton.errors import BatonError
from baton.modeling.prefix_store.store import BlockRoom, Filled, PrefixStore
from baton.types import TokenRange

logger = logging.getLogger(__name__)


class PrefixFilling:
    """One job's blocks to store: consecutive, beginning at the token `start`, where the cached blocks end."""

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
        """Take room in the store for all blocks that fit. Takes some milliseconds, in which it blocks. Must be called
        before the first `write`. For a job without `write`, `finish` takes the room."""
        room = self._taken()
        with self._lock:
            if not self._over:
                self._room = room
                return
        room.drop()

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copy the rows of `tokens` in `layer` into their blocks at once."""
        with self._lock:
            room = self._room
        if room is not None:
            self._copy(room, layer, tokens, data)

    def hold(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Keep a view of the rows of `tokens` in `layer`, whose `data` must never change, for `finish` to copy."""
        self._held.append((layer, tokens, data))

    def finish(self) -> Filled:
        """Copy the held rows, seal the blocks, and return the names of blocks stored and evicted. Call once all layers
        of all tokens have arrived. Returns an empty Filled after a `drop`, and without room or when the store fails.
        Blocks for as long as copying takes."""
        with self._lock:
            if self._over:
                return Filled()
            self._over = True  # now this call owns the room
            room, self._room = self._room, None
            held, self._held = self._held, []
        room = room or self._taken()
        try:
            for piece in held:
                self._copy(room, *piece)
            room.seal()
            return room.filled(self._names)
        except (BatonError, OSError) as error:  # the folder is gone
            logger.warning("nothing is kept of a prompt: %s", error)
            return Filled()
        finally:
            room.drop()

    def sink(self, stored: Sequence[str]) -> list[str]:
        """Copy to disk the blocks that `finish` stored, and return the names of blocks evicted to make room. Does
        nothing where the node keeps no blocks on disk. Blocks for as long as copying takes."""
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
        """Return room for the blocks; empty if the folder is gone or the disk fails, so that no job fails for it."""
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
