"""The process of OpenAI's API that `baton serve` starts: `python -m deploy.front_doors.http_process`.

Reads its HttpPlan from the first line of standard input (`deploy.commands.http_door`), serves on the socket that it
inherits, and answers with its port. Ends when standard input does. One asyncio loop owns all of it.
"""

import asyncio
import json
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TextIO

from baton.errors import BatonError
from baton.process.garbage import collect_rarely
from baton.process.tracing import provider_of
from baton.settings.base import from_json
from deploy.commands.http_door import HttpPlan
from deploy.options.logs import set_up_logs
from gateway.reading import Reader
from gateway.responses.store import StoreLimits
from gateway.server import Certificate, HttpServer
from gateway.upstream import Upstream
from text.tokenizer import Tokenizer


def main() -> int:
    """Serve until standard input ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    answers, sys.stdout = sys.stdout, sys.stderr
    plan = from_json(HttpPlan, sys.stdin.readline())
    set_up_logs(logging.WARNING, plan.log_format)
    try:
        asyncio.run(_serve(plan, answers))
    except BatonError as error:
        _answer(answers, {"error": str(error)})
        return 1
    return 0


async def _serve(plan: HttpPlan, answers: TextIO) -> None:
    section = plan.section
    certificate = Certificate(Path(section.certificate), Path(section.private_key)) if section.certificate else None
    limits = StoreLimits(section.max_responses, section.max_responses_bytes, section.keep_responses_s)
    tokenizer = await asyncio.to_thread(Tokenizer.load, plan.folder)
    reader = Reader(tokenizer, plan.model, section.tool_format)
    spans = provider_of(plan, {"baton.model": plan.model.name})
    async with Upstream(plan.target) as upstream:
        server = await HttpServer.start(
            upstream,
            reader,
            socket.socket(fileno=plan.socket),
            certificate=certificate,
            limits=limits,
            spans=spans,
            has_console=section.console,
        )
        collect_rarely()
        _answer(answers, {"port": server.port})
        await _until_input_ends()
        await server.stop()
    if spans is not None:
        await asyncio.to_thread(spans.shutdown)


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _until_input_ends() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    sys.exit(main())
