"""`make demo`: shows a cluster of its own that streams a chat, a long passage and eight answers at once.

Run as `python -m deploy.demo.show PASSAGE`. The show goes to standard output, which need not be a terminal; the reason
of a failure, one line, to standard error. Ctrl-C ends it at any point, with all that it started. Runs on a loop of its
own.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from baton.errors import BatonError, ConfigError, InvalidArgumentError
from deploy.commands.inspection import add_config_options

if TYPE_CHECKING:
    from baton.client import AsyncClient

QUESTION = "Why is the sky blue? Answer in two sentences."
QUESTIONS = (
    "Name three rivers in Europe.",
    "What is a prime number?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Who wrote Hamlet?",
    "Why do cats purr?",
    "What is the capital of France?",
    "Give a small robot a name.",
)
"""Questions that are asked at the same time."""
_ANSWER_TOKENS = 96
_PASSAGE_TOKENS = 64
_SHORT_TOKENS = 48
_DEADLINE_S = 120.0
_SHOWN_OF_PASSAGE = 240
"""Characters of the passage's end that are shown before its continuation."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status: 0, 1 or 2 for a failure, 128 plus the number of a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo.show", description="Shows Baton at work on this machine."
    )
    parser.add_argument("passage", type=Path, help="text file that the model goes on with")
    add_config_options(parser)
    args = parser.parse_args(argv)
    # Keeps gRPC's core from printing lines about lost connections; it reads this once, when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    # Imported here and below, so that --help is answered at once.
    from deploy.commands.served_child import until_signal

    try:
        status = asyncio.run(until_signal(_run(args, Console(highlight=False))))
    except KeyboardInterrupt:  # Ctrl-C before the loop's handler was set
        return 128 + signal.SIGINT
    except BatonError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError | ConfigError) else 1
    if status:
        print(f"demo: ended by {signal.Signals(status - 128).name}; nothing is left", file=sys.stderr)
    return status


async def _run(args: argparse.Namespace, console: Console) -> int:
    """Run the whole show and return 0. Raises BatonError for a failure; nothing is left then either."""
    passage = _read(args.passage)
    async with _cluster(args, console) as client:
        await _chat(client, console)
        await _continue(client, console, passage)
        await _all_at_once(client, console)
        await _state(client, console)
        console.rule("Shutting down", align="left")
    console.print("The cluster is gone: no process, no shared memory and no file of it is left.")
    return 0


@asynccontextmanager
async def _cluster(args: argparse.Namespace, console: Console) -> "AsyncIterator[AsyncClient]":
    """Yield a client of a cluster of the demo's own, which is gone afterwards."""
    from baton.client import AsyncClient
    from deploy.commands.served_child import own_cluster

    started_s = time.monotonic()

    def report(line: str) -> None:
        console.print(f"{time.monotonic() - started_s:5.1f} s  {line}", markup=False)

    settings = ["orchestrator.disaggregation=always", *args.set]  # the demo shows a chain
    options = [part for each in settings for part in ("--set", each)]
    options += ["--config", str(args.config)] if args.config else []
    console.rule("A cluster of its own: prefill ranks in a chain, a generation group, the orchestrator", align="left")
    with console.status("starting") as status:
        async with own_cluster("demo", options, report) as cluster, AsyncClient(cluster.target) as client:
            status.stop()
            yield client


async def _chat(client: "AsyncClient", console: Console) -> None:
    from deploy.demo.requests import DemoRequest

    console.rule("A chat", align="left")
    console.print(QUESTION, style="bold")
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.generate(messages=messages, max_tokens=_ANSWER_TOKENS, deadline_s=_DEADLINE_S)
    await DemoRequest(QUESTION, stream).show(console)


async def _continue(client: "AsyncClient", console: Console, passage: str) -> None:
    from deploy.demo.requests import DemoRequest

    console.rule("A long passage, prefilled by all ranks, and what the model goes on with", align="left")
    console.print(f"... {passage[-_SHOWN_OF_PASSAGE:].strip()}", style="dim", end="", markup=False, soft_wrap=True)
    stream = client.generate(passage, max_tokens=_PASSAGE_TOKENS, deadline_s=_DEADLINE_S)
    request = DemoRequest("the passage", stream)
    await request.show(console)
    request.draw_timeline(console)


async def _all_at_once(client: "AsyncClient", console: Console) -> None:
    from deploy.demo.requests import DemoRequest, show_all

    console.rule(f"{len(QUESTIONS)} streams at once, and the timeline of the one that waited longest", align="left")
    requests = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        stream = client.generate(messages=messages, max_tokens=_SHORT_TOKENS, deadline_s=_DEADLINE_S)
        requests.append(DemoRequest(question, stream))
    await show_all(requests, console)
    max(requests, key=lambda request: request.first_token_s).draw_timeline(console)


async def _state(client: "AsyncClient", console: Console) -> None:
    """Show what the cluster holds when no request runs. Raises BatonError for leaked slots or jobs."""
    from deploy.demo.requests import group_table

    console.rule("What the cluster holds now", align="left")
    state = await client.cluster_state()
    console.print(group_table(state))
    if num_leaked := sum(group.num_leaked for group in state.groups):
        raise BatonError(f"{num_leaked} slots or jobs leaked: see Ray's logs")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"passage {path} cannot be read ({error}): name a text file") from error


if __name__ == "__main__":
    sys.exit(main())
