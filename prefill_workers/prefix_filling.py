"""How a finished prefill fills the node's prefix store: the last rank of its chain, which sees the KV of all tokens.

What earlier ranks computed is there for a moment, layer by layer (relay.py): it is copied on the engine's thread while
it is. What this rank computed stays as long as anybody has a view of it: it is copied after the first token has left.
Only then are the blocks sealed; a job that fails or is cancelled leaves nothing. So what this costs before the first
token is room for the blocks, in chains of several ranks, and one copy of the earlier ranks' part. They sink to disk,
where there is one, once the rank has reported.

Off step 6 of a request's way (DESIGN.md, sections 4 and 5). `write` and `hold` on the engine's thread, `take`,
`finish` and `sink` on any that may wait, `drop` on any.
"""

import logging
import threading
from collections.abc import Sequence

from baton.errors import BatonError
from baton.types import TokenRange
from modeling.prefix_store.store import Filled, PrefixStore, Room

logger = logging.getLogger(__name__)


class PrefixFilling:
    """One job's blocks, consecutive from the token `start` on, where those end that are cached."""

    def __init__(self, store: PrefixStore, names: Sequence[str], start: int, block_tokens: int) -> None:
        self._store = store
        self._names = tuple(names)
        self._start = start
        self._block_tokens = block_tokens
        self._row_bytes = store.layout.row_bytes
        self._lock = threading.Lock()
        self._room: Room | None = None
        self._over = False
        self._held: list[tuple[int, TokenRange, memoryview]] = []

    def take(self) -> None:
        """Takes room for the blocks, as far as there is any; to be called before `write`, if that is. Blocks for some
        milliseconds."""
        room = self._taken()
        with self._lock:
            if room is None:
                self._over = True  # what is written from here on is lost
            if not self._over:
                self._room = room
                return
        _drop(room)

    def write(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """Copies the rows of `tokens` in `layer` to where they belong."""
        with self._lock:
            room = self._room
        if room is not None:
            self._copy(room, layer, tokens, data)

    def hold(self, layer: int, tokens: TokenRange, data: memoryview) -> None:
        """The same, once there is time: `data` never changes."""
        self._held.append((layer, tokens, data))

    def finish(self) -> Filled:
        """All layers of all tokens have come: the blocks are complete, and sealed, unless they were dropped before.
        Blocks for as long as copying takes."""
        with self._lock:
            if self._over:
                return Filled()
            self._over = True  # from here on the room is this call's
            room, self._room = self._room, None
            held, self._held = self._held, []
        room = room or self._taken()
        if room is None:
            return Filled()
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
        """Copies to disk what `finish` stored, where blocks go there; the names of blocks that had to go for it. Blocks
        for as long as that takes."""
        try:
            return self._store.sink(stored, self._tokens(len(stored)), self._block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("a prompt is not kept on disk: %s", error)
            return []

    def drop(self) -> None:
        """Leaves nothing of what is not about to be sealed. Idempotent."""
        with self._lock:
            self._over = True
            room, self._room = self._room, None
            self._held = []
        _drop(room)

    def _taken(self) -> Room | None:
        """Without a folder, or on a disk that fails, nothing is kept, and no job fails."""
        try:
            return self._store.take(self._names, self._tokens(len(self._names)), self._block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("nothing is kept of a prompt: %s", error)
            return None

    def _tokens(self, num_blocks: int) -> TokenRange:
        return TokenRange(self._start, self._start + num_blocks * self._block_tokens)

    def _copy(self, room: Room, layer: int, tokens: TokenRange, data: memoryview) -> None:
        for writer in room.writers:
            start, end = max(tokens.start, writer.tokens.start), min(tokens.end, writer.tokens.end)
            if start < end:
                rows = slice((start - tokens.start) * self._row_bytes, (end - tokens.start) * self._row_bytes)
                writer.write(layer, TokenRange(start, end), data[rows])


def _drop(room: Room | None) -> None:
    if room is not None:
        room.drop()
