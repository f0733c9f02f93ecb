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
Serves OpenAI's API over HTTP in front of a running server (`baton serve` or `baton gateway`). `baton serve` already
starts one such process; use this command for further ones.

  answers, streamed or not   /v1/chat/completions, /v1/completions, /v1/responses
  other paths                /v1/models, /tokenize, /detokenize, /health, /ready, /metrics, /openapi.json
  web console                /console

The API key of a client, in the header in which OpenAI's clients send it, is passed on to the server. After SIGTERM or
Ctrl-C, running answers have --grace seconds to end."""
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
    text = "address of the server (default: %(default)s)"
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help=text)
    add_front_door(parser, port=8000)
    text = "PEM file with the certificate chain for HTTPS (default: plain HTTP)"
    parser.add_argument("--certificate", type=Path, metavar="FILE", help=text)
    text = "PEM file with the private key of the certificate"
    parser.add_argument("--private-key", type=Path, metavar="FILE", help=text)
    text = "URL of the collector that receives traces by OTLP over gRPC (default: none)"
    parser.add_argument("--otlp-endpoint", default="", metavar="URL", help=text)
    text = "fraction of requests that are traced, from 0 to 1 (default: 1)"
    parser.add_argument("--trace-share", type=float, default=1.0, metavar="PART", help=text)
    parser.add_argument(
        "--tool-format",
        default="auto",
        metavar="NAME",
        help="format of the model's tool calls: hermes, llama3, mistral, smollm2, none, or auto, which is the format "
        "of the chat template (default: auto)",
    )
    text = "maximum number of responses kept, so that later requests can continue them; 0: none (default: %(default)s)"
    parser.add_argument("--max-responses", type=int, default=4096, metavar="NUMBER", help=text)
    text = "time in seconds for which responses are kept (default: %(default)g)"
    parser.add_argument("--keep-responses", type=float, default=86400.0, metavar="SECONDS", help=text)
    _add_rules(parser)
    parser.add_argument("--no-console", action="store_true", help="do not serve the web console")


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests may have in the header Host, in addition to loopback names; may be repeated "
        "(default: any name; on a loopback interface in front of a server without API keys, only loopback names)",
    )
    text = "origin of web pages to accept, like https://chat.example.com; *: all; may be repeated (default: own pages)"
    parser.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=text)
    text = "time in seconds after which a request ends; 0: no limit (default: %(default)g)"
    parser.add_argument("--default-deadline", type=float, default=3600.0, metavar="SECONDS", help=text)
    text = "time in seconds for which an idle connection stays open (default: %(default)g)"
    parser.add_argument("--keep-alive", type=float, default=75.0, metavar="SECONDS", help=text)
    text = "maximum number of open connections from one address; 0: no limit (default: %(default)s)"
    parser.add_argument("--max-connections-per-address", type=int, default=0, metavar="NUMBER", help=text)
    text = "pass the header baton-tenant on to the server; for gateways behind a proxy that sets it"
    parser.add_argument("--trust-tenant", action="store_true", help=text)


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

    rules = HttpRules(
        allowed_hosts=tuple(args.allowed_host),
        allow_origins=tuple(args.allow_origin),
        default_deadline_s=args.default_deadline,
        keep_alive_s=args.keep_alive,
        max_connections_per_address=args.max_connections_per_address,
        trust_tenant=args.trust_tenant,
    )
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
