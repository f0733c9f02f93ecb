"""Implements `baton http`: serves the OpenAI API over HTTP in a separate process, and forwards requests to a running
server. Any number of these processes can use the same server."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from baton.channel_options import DEFAULT_TARGET
from baton.errors import ConfigError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from baton.settings.addresses import join_address
from deploy.commands.admin_channel import given_key
from deploy.front_doors.options import add_front_door, check_front_door, stopped_by_signals
from deploy.options.subcommand import add_command

if TYPE_CHECKING:
    from gateway.door.rules import HttpRules

_ANSWER_S = 10.0
_DESCRIPTION = """\
Serves the HTTP interface that clients of OpenAI's API know, by a running server (`baton serve`, which has one of its
own, or `baton gateway`): /v1/chat/completions, /v1/completions, /v1/responses and /v1/models, streamed or not, and
/tokenize, /detokenize, /health, /ready, /metrics and /openapi.json; and a web console at /console. A client's key, in
the header that OpenAI's clients send, is passed on to the server. SIGTERM and Ctrl-C wait up to --grace seconds for
running answers to end."""
_EXAMPLES = """\
examples:
  baton http --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 48}'
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `http` command to the command line."""
    text = "serve OpenAI's API over HTTP, in front of a running server"
    parser = add_command(commands, run, "http", text, _DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="the server (default: %(default)s)"
    )
    add_front_door(parser, port=8000)
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="chain of certificates in PEM: serve HTTPS")
    parser.add_argument("--private-key", type=Path, metavar="FILE", help="private key of the certificate, in PEM")
    parser.add_argument("--otlp-endpoint", default="", metavar="URL", help="collector of spans, OTLP over gRPC")
    parser.add_argument(
        "--trace-share",
        type=float,
        default=1.0,
        metavar="PART",
        help="fraction of requests that are traced (default: all)",
    )
    parser.add_argument(
        "--tool-format",
        default="auto",
        metavar="NAME",
        help="how the model calls tools: auto, as its chat template says, hermes, llama3, mistral, smollm2, or none",
    )
    parser.add_argument(
        "--max-responses",
        type=int,
        default=4096,
        metavar="NUMBER",
        help="maximum number of responses kept for /v1/responses to continue; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-responses",
        type=float,
        default=86400.0,
        metavar="SECONDS",
        help="time for which responses are kept (default: a day)",
    )
    _add_rules(parser)
    parser.add_argument("--no-console", action="store_true", help="serve no web console at /console")


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="allowed host name of requests, in addition to loopback names; may be repeated (default: any; none on a "
        "loopback interface without API keys)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may call, like https://chat.example.com, or *; may be repeated",
    )
    parser.add_argument(
        "--default-deadline",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="time after which a request ends; 0: never (default: an hour)",
    )
    parser.add_argument(
        "--keep-alive",
        type=float,
        default=75.0,
        metavar="SECONDS",
        help="time for which a connection without a request stays open (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `baton http` until it is interrupted; return the exit status."""
    check_front_door(args)
    if (args.certificate is None) != (args.private_key is None):
        raise InvalidArgumentError("--certificate and --private-key belong together: give both, or neither")
    if not 0 < args.keep_responses < float("inf"):
        raise InvalidArgumentError(f"--keep-responses {args.keep_responses:g} is out of range: use seconds above 0")
    if args.max_responses < 0:
        raise InvalidArgumentError(f"--max-responses {args.max_responses} is out of range: use 0 (none) or more")
    # Imported here, because it imports grpc, tokenizers and uvicorn: --help and mistyped options are answered at once.
    from gateway.door.rules import HttpRules
    from gateway.server import run_on_own_loop

    rules = HttpRules(tuple(args.allowed_host), tuple(args.allow_origin), args.default_deadline, args.keep_alive)
    return run_on_own_loop(_serve(args, rules))


async def _serve(args: argparse.Namespace, rules: "HttpRules") -> int:
    import asyncio

    from rich.console import Console

    from baton.calls.requests import call_metadata
    from baton.process.garbage import collect_rarely
    from baton.process.tracing import exported_spans
    from baton.proto_types import model_from_proto
    from baton.settings.tracing import TraceExport
    from baton.text.tokenizer import Tokenizer
    from baton.transport.channel import make_channel
    from deploy.machine.model_folder import resolve_folder
    from deploy.options.logs import set_up_logs
    from gateway.app import Gateway
    from gateway.listening import open_socket
    from gateway.reading import Reader
    from gateway.responses.store import StoreLimits
    from gateway.server import Certificate, HttpServer
    from gateway.upstream import Upstream
    from orchestrator.api.gateway import ask_model

    set_up_logs(logging.INFO, args.log_format)
    console = Console(stderr=True, highlight=False)
    stopping = stopped_by_signals()
    certificate = None if args.certificate is None else Certificate(args.certificate, args.private_key)
    async with Upstream(args.target, rules.default_deadline_s) as upstream, make_channel(args.target) as channel:
        try:
            model = await ask_model(channel, _ANSWER_S, call_metadata(given_key(args), None))
        except (UnavailableError, DeadlineExceededError) as error:
            raise UnavailableError(f"no server answers at {args.target}: {error}; check --target") from error
        named = args.model or model.name
        folder = await asyncio.to_thread(resolve_folder, named, args.cache, console, weights=False)
        allowed = args.control_tokens_in_text
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder, control_tokens_in_text=allowed)
        if model.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
            raise ConfigError(
                f"the served model, {model.name}, has another tokenizer or chat template: name it by --model"
            )
        reader = Reader(tokenizer, model_from_proto(model), args.tool_format)
        limits = StoreLimits(max_responses=args.max_responses, keep_s=args.keep_responses)
        listening = open_socket(args.host, args.port)
        export = TraceExport(args.otlp_endpoint, args.trace_share)
        async with exported_spans(export, {"baton.model": model.name}) as spans:
            gateway = Gateway(upstream, reader, rules=rules, limits=limits, has_console=not args.no_console)
            server = await HttpServer.start(gateway, listening, certificate=certificate, spans=spans)
            collect_rarely()
            url = f"{'http' if certificate is None else 'https'}://{join_address(args.host, server.port)}"
            console.print(f"{model.name} at {args.target}: serving on {url}", soft_wrap=True)
            await stopping.wait()
            await server.stop(args.grace)
    return 0
