"""Process of one worker: `python -m deploy.groups.worker_process`, started by `deploy.groups.processes`.

The process reads its WorkerConfig from the first line of standard input, loads the model, and serves. It writes its
port and the path of its crash note to standard output. Each further line of input is a WorkerConfig of another role:
the server is replaced, and the model stays loaded. The process exits when standard input ends. gRPC runs on one asyncio
loop, and the engine in a separate thread.
"""

import asyncio
import json
import logging
import signal
import sys
from typing import TextIO

from baton.errors import BatonError
from baton.process.crash_notes import begin_note, end_note
from baton.settings.base import from_json
from deploy.config.worker import WorkerConfig
from deploy.groups.hosting import StartServer, WorkerHost, start_server
from deploy.options.logs import set_up_logs

_MAX_LINE_BYTES = 2**20


def main(start: StartServer = start_server) -> int:
    """Run workers until standard input ends, one after another, and return the exit status. `start` is the function
    that starts a worker's server."""
    set_up_logs(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers, sys.stdout = sys.stdout, sys.stderr
    config = from_json(WorkerConfig, sys.stdin.readline())
    note = "" if config.role == "orchestrator" else begin_note()
    try:
        asyncio.run(_run(config, answers, WorkerHost(start, note), note))
    except BatonError as error:
        _answer(answers, {"error": str(error)})
        return 1
    finally:
        end_note(note)
    return 0


async def _run(config: WorkerConfig, answers: TextIO, host: WorkerHost, note: str) -> None:
    further = await _further_lines()
    try:
        _answer(answers, {"port": await host.serve(config), "crash_note": note})
        while line := await further.readline():
            _answer(answers, {"port": await host.serve(from_json(WorkerConfig, line.decode()))})
    finally:
        await host.stop()


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _further_lines() -> asyncio.StreamReader:
    """Return a reader of the lines of standard input after the first one. The parent writes a line only after the line
    before it was answered."""
    reader = asyncio.StreamReader(_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    sys.exit(main())
