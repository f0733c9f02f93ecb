"""Child process of the gateway benchmark. When it is ready, it sends one message (the greeting, for example its port)
to its parent. Then it answers the parent's questions one after the other."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Answer = Callable[[Any], Awaitable[Any]]
Role = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Any, Answer]]]
"""Main function of a child process: an asynchronous context manager. It yields the greeting to send to the parent
process, and the function that answers the parent's questions. Must be a module-level function."""
NewLoop = Callable[[], asyncio.AbstractEventLoop]

_END_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Resources that a process has used since it started."""

    cpu_s: float
    """Processor time of all threads, in seconds."""
    loop_s: float
    """Processor time of the main thread, in seconds."""
    rss_bytes: int


class Child:
    """Connection of the parent process to one child process."""

    def __init__(self, greeting: Any, pipe: Connection) -> None:
        self.greeting = greeting
        self._pipe = pipe

    async def ask(self, question: Any) -> Any:
        """Send a question to the child process and return its answer. Raises EOFError if the process has died."""
        self._pipe.send(question)
        return await asyncio.to_thread(self._pipe.recv)


@contextlib.asynccontextmanager
async def child(role: Role, *args: Any, new_loop: NewLoop | None = None) -> AsyncIterator[Child]:
    """Context manager. Start a child process that runs `role(*args)`, and yield the parent's connection to it. The
    process ends with the block. Its event loop is created by `new_loop`; None: asyncio's default loop."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, role, args, new_loop), daemon=True)
    process.start()
    theirs.close()  # so that `recv` on our end fails when the process dies
    try:
        yield Child(await asyncio.to_thread(ours.recv), ours)
    finally:
        ours.close()  # this ends the process
        await asyncio.to_thread(process.join, _END_S)
        process.kill()


def usage() -> Usage:
    """Return the resources that this process has used. Must be called on the main thread. Runs the garbage collector
    first, so that garbage does not count as used memory."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return Usage(time.process_time(), time.thread_time(), resident)


def _run(pipe: Connection, role: Role, args: tuple[Any, ...], new_loop: NewLoop | None) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_answer(pipe, role, args))


async def _answer(pipe: Connection, role: Role, args: tuple[Any, ...]) -> None:
    async with role(*args) as (greeting, answer):
        pipe.send(greeting)
        while True:
            try:
                question = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await answer(question))
