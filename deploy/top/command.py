"""`baton top`: shows a running cluster in a terminal, refreshed continuously."""

import argparse

from deploy.commands.admin_channel import add_key_option, given_key
from deploy.options.numbers import positive
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Shows the state of a running cluster, refreshed every --interval seconds, until the key q is pressed:

  requests     length of the queue; rates and latencies of the requests that ended in the last 30 seconds
  generation   slots, KV memory and step times of each generation group
  prefill      for each prefill group, the number of prompts that each rank is computing or has queued
  KV           KV memory in slots and prefix caches, and the rates at which it is read

With --once, the command prints the state once, for scripts, and ends. It measures rates during one --interval. The exit
status is then 1 if the cluster does not serve."""
_EXAMPLES = """\
examples:
  baton top
  baton top --target 127.0.0.1:50051 --interval 5
  baton top --once"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `top` command to the command line."""
    parser = add_command(
        commands,
        run,
        "top",
        "show the state and the load of a running cluster, refreshed continuously",
        _DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument("name", nargs="?", default="baton", help="name of the cluster (default: baton)")
    text = "address of the orchestrator, if it runs on another machine"
    parser.add_argument("--target", metavar="HOST:PORT", help=text)
    text = "time in seconds between two refreshes (default: %(default)s)"
    parser.add_argument("--interval", default="1", metavar="S", help=text)
    parser.add_argument("--once", action="store_true", help="print the state once, and end")
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton top` and return the exit status. If --once is given, the status is 1 if the cluster does not serve."""
    interval_s, api_key = positive("--interval", args.interval), given_key(args)
    # Imported here, so that --help and mistyped options are answered without grpc.
    from rich.console import Console

    from baton.client import Client
    from baton.process.clock import SystemClock
    from deploy.commands.record import serving_endpoint
    from deploy.top.watch import Watch, draw_until_quit, print_once

    target = args.target or serving_endpoint(args.name)
    with Client(target, api_key=api_key) as client:
        watch = Watch(client, target, SystemClock())
        if args.once:
            print_once(watch, interval_s, Console())
            return 0 if watch.is_serving else 1
        draw_until_quit(watch, interval_s, Console())
    return 0
