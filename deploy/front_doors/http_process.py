"""The process of OpenAI's API that `baton serve` starts: `python -m deploy.front_doors.http_process`.

Reads its HttpPlan and then its HttpTarget (`deploy.commands.http_door`), each a line of standard input. Serves on the
socket that it inherits, and answers with its port. Ends when standard input does, or with SIGTERM. One loop owns all of
it.
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
from baton.process.tracing import exported_spans
from baton.settings.base import from_json
from deploy.commands.http_door import HttpPlan, HttpTarget
from deploy.options.logs import set_up_logs
from gateway.reading import Reader
from gateway.responses.store import StoreLimits
from gateway.server import Certificate, HttpServer, run_on_own_loop
from gateway.upstream import Upstream
from text.tokenizer import Tokenizer


def main() -> int:
    """Serve until standard input ends or SIGTERM comes; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    answers, sys.stdout = sys.stdout, sys.stderr
    plan = from_json(HttpPlan, sys.stdin.readline())
    set_up_logs(logging.WARNING, plan.log_format)
    try:
        run_on_own_loop(_serve(plan, answers))
    except BatonError as error:
        _answer(answers, {"error": str(error)})
        return 1
    return 0


async def _serve(plan: HttpPlan, answers: TextIO) -> None:
    section = plan.section
    certificate = Certificate(Path(section.certificate), Path(section.private_key)) if section.certificate else None
    limits = StoreLimits(section.max_responses, section.max_responses_bytes, section.keep_responses_s)
    allowed = plan.control_tokens_in_text
    tokenizer = await asyncio.to_thread(Tokenizer.load, plan.folder, control_tokens_in_text=allowed)
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:  # the launcher ended before the cluster served
        return
    target = from_json(HttpTarget, line)
    reader, attributes = Reader(tokenizer, target.model, section.tool_format), {"baton.model": target.model.name}
    async with (
        exported_spans(plan, attributes) as spans,
        Upstream(target.address, section.default_deadline_s) as upstream,
    ):
        server = await HttpServer.start(
            upstream,
            reader,
            socket.socket(fileno=plan.socket),
            rules=section,
            certificate=certificate,
            limits=limits,
            spans=spans,
            has_console=section.console,
        )
        collect_rarely()
        _answer(answers, {"port": server.port})
        await _until_told_to_end()
        await server.stop()


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _until_told_to_end() -> None:
    """Wait for the end of standard input, or SIGTERM."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    sys.exit(main())
