"""Stops one thread of a child process at an arbitrary point, for example in the middle of a step, of sampling, or of a
copy.

On Linux, signals stop whole processes. Only a tracer (ptrace) can stop a single thread. The tracer is a thread of this
process. When the tracer thread ends, the kernel resumes the stopped thread. If the stopped thread is killed, its
process does not end until the tracer has waited for the thread. The tracer therefore polls.

A process may trace its children, unless `kernel.yama.ptrace_scope` is 2 or more, or a sandbox forbids the call.
"""

import asyncio
import ctypes
import os
import threading
from concurrent.futures import Future
from pathlib import Path

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000
"""Flag `__WALL` of waitpid, which is needed to wait for a traced thread of another process."""
_LOOK_S = 0.02
"""Seconds between two checks of the thread's state: running, stopped or killed."""


def thread_of(pid: int, name: str) -> int:
    """Return the operating system's id of the thread `name` in process `pid`. Raises ProcessLookupError if the thread
    does not exist."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "comm").read_text().strip() == name:
                return int(task.name)
    except FileNotFoundError as error:
        raise ProcessLookupError(f"the threads of process {pid} cannot be listed ({error})") from error
    raise ProcessLookupError(f"process {pid} has no thread {name}")


class HeldThread:
    """Thread of a child process that is stopped from outside, until `release` is called or the thread is killed. The
    thread is given by its id. Each object can be used once."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._held: Future[None] = Future()
        self._released = threading.Event()
        self._tracer = threading.Thread(target=self._trace, name="held-thread")
        self._tracer.start()

    async def until_held(self) -> None:
        """Wait until the thread is stopped or has been killed. Raises ProcessLookupError if the thread had already
        ended, and another OSError if tracing is not permitted."""
        await asyncio.wrap_future(self._held)

    def release(self) -> None:
        """Resume the thread unless it was killed, and wait until the tracer thread has ended. Idempotent."""
        self._released.set()
        self._tracer.join()

    def _trace(self) -> None:
        try:
            _ptrace(_SEIZE, self._thread_id)
            _ptrace(_INTERRUPT, self._thread_id)
        except OSError as error:
            self._held.set_exception(error)
            return
        while not self._released.wait(_LOOK_S):
            thread_id, status = os.waitpid(self._thread_id, _WALL | os.WNOHANG)
            if thread_id and not self._held.done():
                self._held.set_result(None)
            if thread_id and not os.WIFSTOPPED(status):
                return


def _ptrace(request: int, thread_id: int) -> None:
    """Call ptrace. Raises OSError if the call fails."""
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes, call.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
    if call(request, thread_id, None, None) == -1:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
