"""`baton bench`: sends a load to a server and reports the latencies and throughput that clients observe. Needs neither
a cluster nor torch."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_lab.bench import options
from baton_lab.extra import require
from deploy.commands.admin_channel import given_key
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from baton_lab.bench.server import Server, Style

_DESCRIPTION = """\
Sends requests to a running server, like many clients. Prints latencies, requests per second, and the fraction of good
requests, which are answered within all latency targets (--target). The server is any server with OpenAI's API (--url),
or Baton over gRPC (--address). One of these options defines the load:

  --rate         open loop: requests are sent at scheduled times, even if earlier ones are not answered yet. Latencies
                 are measured from the scheduled times
  --concurrency  closed loop: N users, each of which sends its next request after the answer to its previous one
  --trace        open loop: requests of a trace file, with its times, lengths and shared prefixes

Several rates or numbers of users are a sweep: the command runs one load after the other. Metrics with targets are ttft
(time to first token), tpot (time per output token) and e2el (time to the end of the answer). docs/bench.md defines all
numbers. The exit status is 1 if no request of a load was answered."""

_EXAMPLES = """\
examples:
  baton bench --url http://127.0.0.1:8000 --rate 2 --target ttft=500ms --target tpot=50ms
  baton bench --url http://127.0.0.1:8000 --rate 1,2,4,8 --target ttft=1s,tpot=50ms --plot goodput.png
  baton bench --address 127.0.0.1:50051 --concurrency 16 --requests 64 --prompt-tokens 200 --output-tokens 64
  baton bench --url http://127.0.0.1:8000 --api chat --rate 1 --turns 5 --system-tokens 300 --think-time 2
  baton bench --url http://127.0.0.1:8000 --trace mooncake.jsonl --rate 0.5 --json result.json"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `bench` command to the command line."""
    text = "send load to a server, and measure the latencies of its clients"
    parser = add_command(commands, run, "bench", text, _DESCRIPTION, examples=_EXAMPLES)
    options.add_server_options(parser)
    options.add_load_options(parser)
    options.add_request_options(parser)
    group = parser.add_argument_group("results")
    text = "latency target of a good request: ttft, tpot or e2el, for example ttft=500ms; may be repeated"
    group.add_argument("--target", action="append", default=[], metavar="METRIC=TIME", help=text)
    text = "JSON file for the options, all numbers, and each request"
    group.add_argument("--json", type=Path, metavar="FILE", help=text)
    text = "PNG file for a plot of distributions, or of goodput and latencies over a sweep; needs the extra 'lab'"
    group.add_argument("--plot", type=Path, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Run `baton bench`; return the exit status."""
    import asyncio
    import os

    from rich.console import Console

    from baton_lab.bench import parsed, report
    from baton_lab.bench.passages import NOVEL, Passages, read_words
    from baton_lab.bench.targets import parse_targets
    from baton_lab.plot import require_plots

    seed = parsed.seed(args)
    described = (parsed.style(args), parsed.shape(args), parsed.loads(args, seed), parse_targets(args.target))
    passages, api_key = Passages(read_words(args.text or NOVEL), seed), given_key(args)
    if args.json is not None:
        report.check_json(args.json)
    if args.plot is not None:
        require_plots(args.plot)
    # Keeps gRPC's core from printing lines about lost connections; it reads this once, when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251
    from baton_lab.bench.session import Asked, Runs, Session

    asked = Asked(*described, seed)
    session = Session(asked, passages, Console(), Console(stderr=True))

    async def measure() -> tuple[str, Runs]:
        async with _server(args, asked.style, api_key) as server:
            return server.about.model, await session.run(server)

    model, runs = asyncio.run(measure())
    if args.json is not None:
        settings = _settings(args) | {"model": model, "seed": seed, "tokens_per_word": passages.tokens_per_word}
        report.write_json(args.json, settings, runs)
    if args.plot is not None:
        from baton_lab.bench.plot import draw

        draw(runs, asked.targets, f"{model} at {args.url or args.address}, {args.lengths} lengths", args.plot)
    return 0 if all(summary.num_answered for _, summary in runs) else 1


def _server(args: argparse.Namespace, style: "Style", api_key: str | None) -> "AbstractAsyncContextManager[Server]":
    """Return an async context manager that connects to the server given by --url or --address."""
    if args.url is not None:
        require("aiohttp", "--url")
        from baton_lab.bench.openai_server import OpenAiServer

        return OpenAiServer.connected(args.url, args.model, api_key, style)
    from baton_lab.bench.grpc_server import GrpcServer

    return GrpcServer.connected(args.address, api_key, style)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options, except `run`, `json` and `plot`, in a form that JSON can represent."""
    kept = {name: value for name, value in vars(args).items() if name not in ("run", "json", "plot")}
    settings: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return settings
