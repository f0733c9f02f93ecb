"""Process that serves the OpenAI API over HTTP for `baton serve`: `python -m deploy.front_doors.http_process`.

The process reads its HttpPlan and then its HttpTarget (`deploy.commands.http_door`), each as one line of standard
input. It serves on the socket that it inherits. It writes its port to standard output when it serves, then an empty
line at each heartbeat. After SIGTERM, running requests have `grace_s` seconds to finish. At the end of standard input,
running requests are ended immediately. Everything runs on one asyncio loop.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TextIO

from baton.errors import BatonError
from baton.process.garbage import collect_rarely
from baton.process.tracing import exported_spans
from baton.settings.base import from_json
from baton.text.tokenizer import Tokenizer
from deploy.commands.http_door import HttpPlan, HttpTarget
from deploy.options.logs import set_up_logs
from gateway.app import Gateway
from gateway.reading import Reader
from gateway.responses.store import StoreLimits
from gateway.server import Certificate, HttpServer, run_on_own_loop
from gateway.upstream import Upstream


def main() -> int:
    """Serve until standard input ends or SIGTERM arrives; return the exit status."""
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
        gateway = Gateway(upstream, reader, rules=section, limits=limits, has_console=section.console)
        listening = socket.socket(fileno=plan.socket)
        server = await HttpServer.start(gateway, listening, certificate=certificate, spans=spans)
        collect_rarely()
        _answer(answers, {"port": server.port})
        beating = asyncio.create_task(_beat(answers.fileno(), plan.heartbeat_s))
        await _serve_until_told(server, section.grace_s)
        beating.cancel()


def _answer(answers: TextIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def _beat(answers: int, every_s: float) -> None:
    """Send heartbeats to the launcher until cancelled. Does not wait if the launcher does not read them."""
    os.set_blocking(answers, False)
    while True:
        with contextlib.suppress(OSError):
            os.write(answers, b"\n")
        await asyncio.sleep(every_s)


async def _serve_until_told(server: HttpServer, grace_s: float) -> None:
    """Serve until SIGTERM, and then at most `grace_s` seconds for running requests; or until the end of standard
    input."""
    loop, told, reader = asyncio.get_running_loop(), asyncio.Event(), asyncio.StreamReader()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    launcher = asyncio.create_task(reader.read())
    signalled = asyncio.create_task(told.wait())
    await asyncio.wait((launcher, signalled), return_when=asyncio.FIRST_COMPLETED)
    ending = asyncio.create_task(server.stop(0.0 if launcher.done() else grace_s))
    await asyncio.wait((launcher, ending), return_when=asyncio.FIRST_COMPLETED)
    await server.stop()
    await ending
    for task in (launcher, signalled):
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
