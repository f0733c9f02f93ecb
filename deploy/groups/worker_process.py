"""The process of one worker: `python -m deploy.groups.worker_process`, started by deploy.groups.processes.

Reads its WorkerConfig from the first line of standard input, loads the model, serves, answers with its port, and exits
when standard input ends. One asyncio loop owns gRPC; the engine has a thread of its own.
"""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TextIO

from baton.errors import BatonError
from baton.settings.base import from_json
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import Server, start_server

StartServer = Callable[[WorkerConfig], Awaitable[Server]]


def main(start: StartServer = start_server) -> int:
    """Run the worker that `start` makes until standard input ends; return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers, sys.stdout = sys.stdout, sys.stderr
    config = from_json(WorkerConfig, sys.stdin.readline())
    try:
        asyncio.run(_run(config, answers, start))
    except BatonError as error:
        _answer(answers, {"error": str(error)})
        return 1
    return 0


async def _run(config: WorkerConfig, answers: TextIO, start: StartServer) -> None:
    server = await start(config)
    try:
        _answer(answers, {"port": server.port})
        await _end_of_input()
    finally:
        await server.stop()


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    sys.exit(main())
