"""Saves answers: copies the KV of ended sequences from their slots to the node's prefix store, so that later prompts
can use it.

`engine.core` passes each ended sequence to the saver through the stream's RowEndHook. The saver then holds the
sequence's slot, and releases it after the copy. The saver's own thread copies the complete blocks of prompt and output
that the store does not have. During the copy, the saver has an open reader of the slot (SlotReader), so that the slot's
memory is not given to another sequence. The last token of an output has no KV, because no step ran it. The KV of output
tokens comes from decode steps, which round differently from a prefill. In bf16, the output for a later prompt may
therefore differ from the output without cached KV.

An answer is dropped at once when its stream is cancelled, when the engine needs the memory or closes, when the store is
full, or when too many other answers wait. If the answer is being copied at this time, the copied blocks are dropped as
well. Another thread, which holds no slot, copies stored answers from memory to the disk.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from baton.errors import BatonError
from baton.modeling.prefix_store.block_files import BlockWriter
from baton.modeling.prefix_store.store import Filled, PrefixStore
from baton.prefix_blocks import BlockNaming, PromptBlocks
from baton.types import LeaseRef, TokenRange
from generate_workers.engine.rows import Row
from generate_workers.slots.slot_access import SlotReader
from generate_workers.slots.table import SlotTable

logger = logging.getLogger(__name__)

_MAX_WAITING = 16
"""Maximum number of answers that wait for the saver's thread. Each of them holds a slot that a new sequence could
use."""
_MAX_SINKING = 64
"""Maximum number of answers that wait to be written to the disk. Further answers are stored only in memory. They are
written to the disk if they are stored again later."""
_MOST_TOKENS = 1024
"""Maximum number of tokens that are copied from a slot at once, unless one block has more tokens. Fewer tokens would be
slower, because each copy from a device has a fixed cost. More tokens would use more host memory."""


@dataclass(frozen=True, eq=False)
class _Answer:
    """Ended sequence whose slot is held until its KV is stored or dropped."""

    ref: LeaseRef
    reader: SlotReader
    token_ids: tuple[int, ...]
    """Tokens whose KV is in the slot: all tokens of the sequence except the last."""
    stream: "StreamAnswers"


class StreamAnswers:
    """RowEndHook of one stream: takes over the slots of its ended sequences so that their KV is saved. Protected by the
    saver's lock."""

    def __init__(self, saver: "AnswerSaver", naming: BlockNaming, on_filled: Callable[[Filled], None]) -> None:
        """Make the hook of one stream. `naming` computes the names of the stream's blocks. `on_filled` is called once,
        on any thread, with the blocks that were stored. The call is made when the stream has ended and the saver does
        not hold any of the stream's slots. `on_filled` must neither block nor raise."""
        self.naming = naming
        self.num_held = 0
        """Number of slots of the stream's ended sequences that are held until their KV is stored."""
        self.filled = Filled()
        """Blocks of the stream that were stored so far."""
        self.is_over = False
        """True if all sequences of the stream have ended."""
        self.on_filled = on_filled
        self._saver = saver
        self._is_cancelled = False

    def take_row(self, row: Row) -> bool:
        """Take over the slot of an ended sequence, so that its KV can be saved. Return False if the stream is
        cancelled, the saver is closed, or too many answers wait. The engine then frees the slot."""
        return not self._is_cancelled and self._saver.save(row, self)

    def stream_ended(self) -> None:
        """Record that the stream has ended. As soon as each of the stream's answers is stored or dropped, `on_filled`
        is called with the blocks that were stored."""
        self._saver.end(self)

    def cancel(self) -> None:
        """Drop the stream's answers that are not stored yet, and accept no further answers. Any thread may call it.
        Idempotent."""
        self._is_cancelled = True
        self._saver.give_up(self)


class AnswerSaver:
    """Saves the answers of one group to the prefix store. Any thread may call it."""

    def __init__(self, slots: SlotTable, store: PrefixStore) -> None:
        self.num_bytes_stored = 0
        """Total bytes of KV copied from slots to the store so far."""
        self._slots = slots
        self._store = store
        self._lock = threading.Lock()
        """Lock that protects `_held`, `_is_closed` and all StreamAnswers. It must not be held when the lock of the
        slots is acquired."""
        self._held: dict[_Answer, Future[None]] = {}
        """Answers whose slots the saver holds, with the future of each answer's copy. The thread that removes an answer
        from this mapping must release its slot."""
        self._is_closed = False
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="answer-saver")
        self._sinker = ThreadPoolExecutor(1, thread_name_prefix="answer-sinker")
        self._may_sink = threading.BoundedSemaphore(_MAX_SINKING)

    def save(self, row: Row, stream: StreamAnswers) -> bool:
        """Take over the slot of an ended sequence of `stream`, and queue its answer for saving. Return False if too
        many answers wait, or if the saver is closed. Called on the engine's thread."""
        token_ids = tuple(row.token_ids[:-1])  # the last token has no KV
        answer = _Answer(row.ref, self._slots.open_read(row.ref), token_ids, stream)
        with self._lock:
            if is_worth_it := len(self._held) <= _MAX_WAITING and not self._is_closed:
                stream.num_held += 1
                self._held[answer] = self._saver.submit(self._save, answer)
        if not is_worth_it:
            answer.reader.close()
        return is_worth_it

    def end(self, stream: StreamAnswers) -> None:
        """Record that a stream has ended. If the saver does not hold any of the stream's slots, call the stream's
        `on_filled` with the blocks that were stored."""
        with self._lock:
            stream.is_over = True
            is_complete = not stream.num_held
        if is_complete:
            stream.on_filled(stream.filled)

    def give_up(self, stream: StreamAnswers | None = None) -> bool:
        """Drop the answers of one stream that are not stored yet, and release their slots. None: the answers of all
        streams. Return True if an answer was dropped. If an answer is being copied, the copy ends soon, and its slot
        becomes free only then."""
        with self._lock:
            given_up = [each for each in self._held if stream in (None, each.stream)]
        for answer in given_up:
            self._release(answer, Filled())
        return bool(given_up)

    def close(self) -> None:
        """Drop all answers that are not stored yet, and end the threads. Blocks until running copies have ended.
        Answers that wait for the disk are not written to it. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.give_up()
        self._saver.shutdown()
        self._sinker.shutdown(cancel_futures=True)

    def _release(self, answer: _Answer, filled: Filled) -> None:
        """Release an answer's slot, unless the answer was dropped before. If the stream has ended and the saver does
        not hold any other slot of the stream, call the stream's `on_filled` with the stored blocks."""
        stream = answer.stream
        with self._lock:
            saving = self._held.pop(answer, None)
            if saving is None:
                return
            stream.num_held -= 1
            stored, evicted = stream.filled.stored + filled.stored, stream.filled.evicted + filled.evicted
            stream.filled = Filled(tuple(dict.fromkeys(stored)), evicted)
            is_complete = stream.is_over and not stream.num_held
        if saving.cancel():  # it has not begun
            answer.reader.close()
        self._slots.release(answer.ref)
        if is_complete:
            stream.on_filled(stream.filled)

    def _save(self, answer: _Answer) -> None:
        filled = Filled()
        try:
            filled = self._copy(answer)
        except (BatonError, OSError) as error:  # the slot was released, or the folder does not exist any more
            logger.info("an answer is not kept: %s", error)
        except Exception:
            logger.exception("an answer is not kept")
        try:
            answer.reader.close()
            self._release(answer, filled)
        except Exception:
            logger.exception("the slot of an answer cannot be freed")
        if self._store.below is not None and filled.stored and self._may_sink.acquire(blocking=False):
            self._sinker.submit(self._sink, filled, answer.stream.naming.block_tokens)

    def _copy(self, answer: _Answer) -> Filled:
        naming, layout, reader = answer.stream.naming, self._store.layout, answer.reader
        reader.check()
        blocks = PromptBlocks.of(answer.token_ids, naming.block_tokens, layout.fingerprint, naming.salt)
        if not blocks.names:
            return Filled()
        reader.keep_prefix(blocks.names, naming.block_tokens)
        tokens = TokenRange(0, len(blocks.names) * naming.block_tokens)
        room = self._store.take(blocks.names, tokens, naming.block_tokens)
        try:
            for writers in _adjoining(room.writers):
                tokens = TokenRange(writers[0].tokens.start, writers[-1].tokens.end)
                for layer in range(layout.num_layers):
                    data = reader.export(layer, tokens)
                    for writer in writers:
                        start = (writer.tokens.start - tokens.start) * layout.row_bytes
                        num_bytes = len(writer.tokens) * layout.row_bytes
                        writer.write(layer, writer.tokens, data[start : start + num_bytes])
                self.num_bytes_stored += len(tokens) * layout.token_bytes
            room.seal()
        finally:
            room.drop()
        return room.filled(blocks.names)

    def _sink(self, filled: Filled, block_tokens: int) -> None:
        """Copy stored blocks to disk. Blocks evicted meanwhile are not reported; a later lookup misses them."""
        try:
            self._store.sink(filled.stored, TokenRange(0, len(filled.stored) * block_tokens), block_tokens)
        except (BatonError, OSError) as error:
            logger.warning("an answer is not kept on disk: %s", error)
        except Exception:
            logger.exception("an answer is not kept on disk")
        finally:
            self._may_sink.release()


def _adjoining(writers: Sequence[BlockWriter]) -> Iterator[list[BlockWriter]]:
    """Yield all writers in groups of consecutive blocks. A group has at most `_MOST_TOKENS` tokens, unless a single
    block has more."""
    together: list[BlockWriter] = []
    for writer in writers:
        if together and (
            writer.tokens.start != together[-1].tokens.end
            or writer.tokens.end - together[0].tokens.start > _MOST_TOKENS
        ):
            yield together
            together = []
        together.append(writer)
    if together:
        yield together
