"""`baton trace`: writes the stages of a request that has ended to a file that Perfetto can display."""

import argparse
import sys
from pathlib import Path

from deploy.commands.admin_channel import add_cluster, add_key_option, cluster_channel
from deploy.options.subcommand import add_command

_DESCRIPTION = """\
Writes the timeline of a finished request to a file: queue, placement, layers and transfers of each rank, decoding, and
failed attempts. The pages https://ui.perfetto.dev and chrome://tracing display such files. They read the file in the
browser and send it to no server.

The orchestrator keeps the latest 256 requests. Their ids are in its log, in `stream.output.request_id` of baton.Client,
and in the header x-request-id over HTTP."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `trace` command to the command line."""
    parser = add_command(commands, run, "trace", "write the timeline of a request as a file for Perfetto", _DESCRIPTION)
    parser.add_argument("request", help="id of the request")
    add_cluster(parser)
    text = "file to write; -: standard output (default: REQUEST.trace.json)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    add_key_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run `baton trace`; return the exit status."""
    # Imported here, so that --help and mistyped options are answered without grpc.
    from baton.v1.admin_pb2 import GetTraceRequest
    from baton.v1.admin_pb2_grpc import AdminStub
    from deploy.traces.perfetto import perfetto_json
    from orchestrator.api.admin import trace_from_proto

    with cluster_channel(args) as channel:
        trace = trace_from_proto(AdminStub(channel).GetTrace(GetTraceRequest(request_id=args.request), timeout=10.0))
    text = perfetto_json(trace)
    out = args.out or Path(f"{args.request.replace('/', '_')}.trace.json")
    if str(out) == "-":
        sys.stdout.write(text)
        return 0
    out.write_text(text)
    print(f"{out}: open it on https://ui.perfetto.dev")
    return 0
