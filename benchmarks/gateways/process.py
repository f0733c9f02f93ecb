"""A process of the gateway benchmark: it starts, says where it is reached, and answers one question after the other."""

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
"""What a process is: on entering it, its greeting, and what answers its questions. A function of a module."""

_END_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What a process has used so far."""

    cpu_s: float
    """Of all its threads."""
    loop_s: float
    """Of its main thread."""
    rss_bytes: int


class Child:
    """The parent's end."""

    def __init__(self, greeting: Any, pipe: Connection) -> None:
        self.greeting = greeting
        self._pipe = pipe

    async def ask(self, question: Any) -> Any:
        """The process's answer; raises EOFError when it has died."""
        self._pipe.send(question)
        return await asyncio.to_thread(self._pipe.recv)


@contextlib.asynccontextmanager
async def child(role: Role, *args: Any) -> AsyncIterator[Child]:
    """A process that has started as `role(*args)`; it has ended afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, role, args), daemon=True)
    process.start()
    theirs.close()  # so that a process that died ends our recv
    try:
        yield Child(await asyncio.to_thread(ours.recv), ours)
    finally:
        ours.close()  # which ends it
        await asyncio.to_thread(process.join, _END_S)
        process.kill()


def usage() -> Usage:
    """Of this process; called on its main thread. What is garbage does not count as memory."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return Usage(time.process_time(), time.thread_time(), resident)


def _run(pipe: Connection, role: Role, args: tuple[Any, ...]) -> None:
    asyncio.run(_answer(pipe, role, args))


async def _answer(pipe: Connection, role: Role, args: tuple[Any, ...]) -> None:
    async with role(*args) as (greeting, answer):
        pipe.send(greeting)
        while True:
            try:
                question = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            pipe.send(await answer(question))
