"""Saving answers: when a row has ended, its KV is copied from its slot to the node's prefix store, for later prompts.

`engine.core` calls it when a choice has ended. Whole blocks of prompt and output that the store lacks are copied, by a
reader that the slot counts, on a thread of its own; the row holds its slot until then. The last token of an output has
no KV, because no step ran it. Output tokens' KV comes from decode steps, which do not round as a prefill does: in bf16
a later prompt's tokens may differ from those of a cold start, as they may after a preemption.

An answer is given up at once when its row is released meanwhile (its stream was cancelled, the engine closes or needs
the memory), when the store has no room, or when too many others wait. Half-written blocks are then dropped.

Answers that go on to disk do so on another thread, which holds no slot.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.errors import BatonError
from baton.prefix_blocks import BlockNaming, PromptBlocks
from baton.types import TokenRange
from generate_workers.slots.access import SlotReader
from modeling.prefix_store.store import Filled, PrefixStore, Room

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
"""Rows that may wait for the thread. Each holds a slot that a new row could have."""
_MAX_SINKING = 64
"""Answers that may wait for the disk. Further ones go to disk only when they are stored anew."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A row's tokens whose KV is in its slot, and the naming of their blocks."""

    reader: SlotReader
    token_ids: tuple[int, ...]
    naming: BlockNaming
    on_saved: Callable[[Filled], None]


class AnswerSaver:
    """Saves the answers of one group. `save` and `give_up` are called on the engine's thread, `close` after its end."""

    def __init__(self, store: PrefixStore) -> None:
        self.num_bytes_stored = 0
        """Bytes copied from slots so far."""
        self._store = store
        self._changed = threading.Condition()
        """Guards `_waiting` and `_is_closed`."""
        self._waiting: deque[Answer] = deque()
        self._is_closed = False
        self._sinker = ThreadPoolExecutor(1, thread_name_prefix="answer-sinker")
        self._may_sink = threading.BoundedSemaphore(_MAX_SINKING)
        self._thread = threading.Thread(target=self._run, name="answer-saver", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Return whether to skip saving: too many answers wait for another to be worth its slot, or the thread has
        ended."""
        return len(self._waiting) >= _MAX_WAITING or not self._thread.is_alive()

    def save(self, answer: Answer) -> None:
        """Queue an answer. `answer.on_saved` is called once, on the saver's thread, after the reader has left the
        slot."""
        with self._changed:
            self._waiting.append(answer)
            self._changed.notify()

    def give_up(self, answer: Answer) -> None:
        """Give up an answer whose row is about to be released. If it still waits, its reader leaves now and `on_saved`
        is not called; if its copy runs, the copy ends as soon as the row is released."""
        with self._changed:
            if answer not in self._waiting:
                return
            self._waiting.remove(answer)
        answer.reader.close()

    def close(self) -> None:
        """Return when every answer that was queued is finished, which is at once for rows that have been released.
        Answers that wait for the disk do not go there. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._sinker.shutdown(cancel_futures=True)

    def _next(self) -> Answer | None:
        """Wait for the next answer; return None once closed and none waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None

    def _run(self) -> None:
        while (answer := self._next()) is not None:
            filled = Filled()
            try:
                filled = self._save(answer)
            except (BatonError, OSError) as error:  # the row was released, or the folder is gone
                logger.info("an answer is not kept: %s", error)
            except Exception:
                logger.exception("an answer is not kept")
            try:
                answer.reader.close()
            except Exception:
                logger.exception("the reader of an answer cannot leave its slot")
            answer.on_saved(filled)
            if self._store.below is not None and filled.stored and self._may_sink.acquire(blocking=False):
                self._sinker.submit(self._sink, filled, answer.naming.block_tokens)

    def _save(self, answer: Answer) -> Filled:
        answer.reader.check()
        naming, layout = answer.naming, self._store.layout
        blocks = PromptBlocks.of(answer.token_ids, naming.block_tokens, layout.fingerprint, naming.salt)
        if not blocks.names:
            return Filled()
        tokens = TokenRange(0, len(blocks.names) * naming.block_tokens)
        room = self._store.take(blocks.names, tokens, naming.block_tokens)
        try:
            self._fill(room, answer.reader)
            room.seal()
        finally:
            room.drop()
        return room.filled(blocks.names)

    def _sink(self, filled: Filled, block_tokens: int) -> None:
        """Copy stored blocks to disk, if the store has one. Blocks evicted there are not reported: a lookup finds them
        gone."""
        try:
            self._store.sink(filled.stored, TokenRange(0, len(filled.stored) * block_tokens), block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("an answer is not kept on disk: %s", error)
        except Exception:
            logger.exception("an answer is not kept on disk")
        finally:
            self._may_sink.release()

    def _fill(self, room: Room, reader: SlotReader) -> None:
        for writer in room.writers:
            for layer in range(self._store.layout.num_layers):
                writer.write(layer, writer.tokens, reader.export(layer, writer.tokens))
            self.num_bytes_stored += len(writer.tokens) * self._store.layout.token_bytes
