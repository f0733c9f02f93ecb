"""`make demo`: starts a cluster for the demo, and sends it a chat, a long passage and eight questions at the same time.

Each scene begins with an explanation.

Run as `python -m baton_lab.demo.show PASSAGE`. The demo is printed to standard output, which may be a file. The reason
of a failure is printed to standard error, in one line. Ctrl-C ends the demo at any point, with all processes that it
started. Runs on its own event loop.
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

_ALL = (
    "A cluster comes up on this machine, answers a question, continues a long passage, answers eight questions at "
    "once, and goes. Its model is {}, which a first run converts."
)
_CLUSTER = (
    "What `baton serve` starts, on this machine only: Ray, which places the processes; two prefill ranks, which share "
    "long prompts; a generation engine; the orchestrator, which clients talk to. A first run measures this "
    "processor, for some seconds. Each line begins with the seconds since the start."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return the exit status: 0 for success, 1 or 2 for a failure, 128 plus the signal's number after a
    signal."""
    parser = argparse.ArgumentParser(
        prog="python -m baton_lab.demo.show", description="Shows Baton at work on this machine."
    )
    parser.add_argument("passage", type=Path, help="text file that the model continues")
    add_config_options(parser)
    args = parser.parse_args(argv)
    # Keeps gRPC's core from printing lines about lost connections; it reads this once, when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    # Imported here and below, so that --help is answered at once.
    from baton_lab.served_child import until_signal

    console = Console(highlight=False)
    args.set = ["orchestrator.disaggregation=always", *args.set]  # the demo shows a chain
    try:
        passage = _read(args.passage)
        _convert_model(args, console)
        status = asyncio.run(until_signal(_run(args, passage, console)))
    except KeyboardInterrupt:  # Ctrl-C before the loop's handler was set
        return 128 + signal.SIGINT
    except BatonError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError | ConfigError) else 1
    if status:
        print(f"demo: ended by {signal.Signals(status - 128).name}; nothing is left", file=sys.stderr)
    return status


def _convert_model(args: argparse.Namespace, console: Console) -> None:
    """Print the demo's introduction, and convert the model unless it is converted already. `baton serve` would convert
    it too, but writes to a pipe, where its progress bar is not visible."""
    from deploy.config.file import load_config
    from deploy.machine.model_folder import resolve_folder

    model = load_config(args.config, args.set).model
    console.print(_ALL.format(model.name), style="italic", markup=False)
    resolve_folder(model.name, model.cache, console)


async def _run(args: argparse.Namespace, passage: str, console: Console) -> int:
    """Run all scenes and return 0. Raises BatonError for a failure. The cluster is shut down in either case."""
    from baton_lab.demo.requests import show_all_at_once, show_chat, show_passage, show_state

    async with _cluster(args, console) as client:
        await show_chat(client, console)
        await show_passage(client, console, passage)
        await show_all_at_once(client, console)
        await show_state(client, console)
        console.rule("Shutting down", align="left")
    console.print("The cluster is gone: no process, no shared memory and no file of it is left.")
    return 0


@asynccontextmanager
async def _cluster(args: argparse.Namespace, console: Console) -> "AsyncIterator[AsyncClient]":
    """Start a cluster for the demo, and yield a client of it. The cluster is shut down afterwards."""
    from baton.client import AsyncClient
    from baton_lab.demo.requests import announce
    from baton_lab.served_child import own_cluster

    started_s = time.monotonic()

    def report(line: str) -> None:
        console.print(f"{time.monotonic() - started_s:5.1f} s  {line}", markup=False)

    options = [part for each in args.set for part in ("--set", each)]
    options += ["--config", str(args.config)] if args.config else []
    announce(console, "A cluster of its own: prefill ranks in a chain, a generation group, the orchestrator", _CLUSTER)
    with console.status("starting") as status:
        async with own_cluster("demo", options, report) as cluster, AsyncClient(cluster.target) as client:
            status.stop()
            yield client


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"passage {path} cannot be read ({error}): name a text file") from error


if __name__ == "__main__":
    sys.exit(main())
