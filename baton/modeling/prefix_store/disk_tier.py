"""A prefix store on a disk that may stop answering, such as an unreachable file server or a failed disk.

A call to such a disk cannot be interrupted, so no start, request or heartbeat may wait for it without a limit. Each
call, including the call that opens the store, runs on its own daemon thread. The caller waits for the result, but gives
up once the disk has given no answer for ANSWER_S seconds. From then until the call returns, the store counts as empty:
no other call is made, and `fault` gives the reason.

`baton.modeling.prefix_store.store` uses this store as the tier below its blocks in memory. Thread-safe.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import BatonError
from baton.process.clock import Clock

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Timeout in seconds after which a disk that does not answer counts as hung. A longer timeout would be useless, because
computing the KV of a block again usually takes less than this time."""

FOLDER_S = 30.0
"""Timeout in seconds for calls that list, copy or remove a whole folder. It restarts whenever the disk answers. No
request waits for these calls."""

Store = TypeVar("Store")
Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass(eq=False)
class _Call:
    """A call to the disk that has not returned."""

    within_s: float
    """Timeout of the call in seconds. It restarts whenever the disk answers."""
    due_s: float
    """Time in seconds on the clock at which the disk counts as hung, unless it answers before."""
    num_answers: int = 0


class DiskTier(Generic[Store]):
    """Prefix store in a folder on disk, opened by `open_store`. `limit_bytes` is the maximum size of the store in
    bytes."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        folder: Path,
        limit_bytes: int,
        *,
        clock: Clock,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Start to open the store, and wait for at most `answer_s` seconds until it is open. No error is raised if the
        store cannot be opened: `fault` then gives the reason."""
        self.limit_bytes = limit_bytes
        self._folder, self._clock, self._answer_s = folder, clock, answer_s
        self._store: Store | None = None
        self._error = ""
        self._lock = threading.Lock()
        """Lock for `_calls` and for the fields of each call in `_calls`."""
        self._calls: dict[threading.Thread, _Call] = {}
        self._ask(partial(self._open, open_store), None, answer_s)

    @property
    def fault(self) -> str:
        """Return the reason why the disk is not used now, in one line. Empty while the disk is used."""
        with self._lock:
            is_hung = any(self._clock.now_s() >= call.due_s for call in self._calls.values())
        if is_hung:
            return (
                f"{self._folder} does not answer: check the disk; nothing is read from it or kept there until it does"
            )
        return self._error

    def ask(self, work: Callable[[Store], Result], otherwise: Other, within_s: float | None = None) -> Result | Other:
        """Return the result of `work(store)`, or `otherwise` if the store is not open or does not answer.

        Returns `otherwise` immediately if the disk is known to be unusable. Also returns `otherwise` once the disk has
        given no answer for `within_s` seconds (None: `answer_s`). `work` then continues on its thread, and its result
        is dropped. Errors of `work` are raised.
        """
        store = self._store
        if store is None or self.fault:
            return otherwise
        return self._ask(partial(work, store), otherwise, within_s or self._answer_s)

    def begin(self, work: Callable[[Store], None]) -> None:
        """Start `work(store)` on a thread and return without waiting for it. Does nothing if the store is not open or
        does not answer. `work` must not raise an error."""
        store = self._store
        if store is not None and not self.fault:
            self._begin(partial(work, store), self._answer_s)

    def answered(self) -> None:
        """Record that the disk has answered, and restart the timeout of the current call. Called by `work` when it
        makes progress."""
        with self._lock:
            call = self._calls[threading.current_thread()]
            call.num_answers += 1
            call.due_s = self._clock.now_s() + call.within_s

    def _open(self, open_store: Callable[[], Store]) -> None:
        try:
            self._store = open_store()
        except (BatonError, OSError) as error:  # the tier in memory works without it
            self._error = f"{error}; nothing is kept on disk until the worker starts again"
            logger.warning("%s", self._error)

    def _ask(self, work: Callable[[], Result], otherwise: Other, within_s: float) -> Result | Other:
        call, running = self._begin(work, within_s)
        num_seen = -1
        while num_seen < call.num_answers:
            num_seen = call.num_answers
            if wait([running], within_s).done:
                try:
                    return running.result()
                finally:
                    del running  # its error's traceback refers to this frame
        with self._lock:
            call.due_s = self._clock.now_s()
        logger.warning("prefix store: %s", self.fault or f"{self._folder} answers late")
        return otherwise

    def _begin(self, work: Callable[[], Result], within_s: float) -> "tuple[_Call, Future[Result]]":
        call, running = _Call(within_s, self._clock.now_s() + within_s), Future[Result]()
        thread = threading.Thread(target=self._run, args=(work, running), name="prefix-disk", daemon=True)
        with self._lock:
            self._calls[thread] = call
        thread.start()
        return call, running

    def _run(self, work: Callable[[], Result], running: "Future[Result]") -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller that waits
            self._end()
            running.set_exception(error)
        else:
            self._end()
            running.set_result(result)
        finally:
            del work, running  # an error's traceback refers to this frame

    def _end(self) -> None:
        with self._lock:
            del self._calls[threading.current_thread()]
