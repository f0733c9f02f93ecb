"""`baton gateway`: serves clients in a process of its own, in front of an orchestrator elsewhere. Any number of
gateways may share one orchestrator."""

import argparse
from pathlib import Path

from baton.channel_options import DEFAULT_TARGET
from baton.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from baton.settings.paths import cache_folder
from deploy.config.environment import read_variable

_ANSWER_S = 10.0

_DESCRIPTION = """\
Serves clients as `baton serve` does: checks what they ask, renders chats, tokenizes; a cluster's orchestrator does the
rest. Clients see no difference. Gateways keep nothing of a stream: a client whose gateway dies goes on through another
(as a target, ipv4:HOST:PORT,HOST:PORT names several), and a gateway whose orchestrator restarts goes on with the next
one. SIGTERM and Ctrl-C let running streams end first, for --grace seconds."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `gateway` command to the command line."""
    parser = commands.add_parser(
        "gateway",
        help="serve clients in front of an orchestrator that runs somewhere else",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--orchestrator",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"of the cluster, as `baton serve` prints it (default: {DEFAULT_TARGET})",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=50052, help="0 takes any free one (default: 50052)")
    parser.add_argument(
        "--model",
        help="Hugging Face folder, GGUF file, or known name, for its tokenizer and chat template (default: the "
        "orchestrator's model, if its name is a known one)",
    )
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder for converted models")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="for running streams, at the end (default: 30)"
    )
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable with the API key of the gateway's own calls, for a cluster that requires keys; its "
        "clients send their own",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `baton gateway` until it is interrupted; return the exit status."""
    if not 0 <= args.port < 2**16:
        raise InvalidArgumentError(f"--port {args.port} is out of range: use 0 to {2**16 - 1}")
    if not 0 <= args.grace < float("inf"):
        raise InvalidArgumentError(f"--grace {args.grace:g} is out of range: use 0 seconds, or more")
    if not args.orchestrator.strip():
        raise InvalidArgumentError("--orchestrator is empty: use HOST:PORT, as `baton serve` prints it")
    # Imported here, because they import grpc and tokenizers: --help and mistyped options are answered at once.
    import asyncio

    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    import signal

    from rich.console import Console

    from baton.clock import SystemClock
    from baton.process.garbage import collect_rarely
    from baton.requests import call_metadata
    from deploy.machine.model_folder import resolve_folder
    from orchestrator.api.gateway import Gateway, ask_model
    from text.tokenizer import Tokenizer
    from transport.channel import make_channel

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    console = Console(stderr=True, highlight=False)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    caller = call_metadata(None if args.api_key_env is None else read_variable(args.api_key_env), None)
    async with make_channel(args.orchestrator) as orchestrator:
        try:
            model = await ask_model(orchestrator, _ANSWER_S, caller)
        except (UnavailableError, DeadlineExceededError) as error:
            raise UnavailableError(
                f"no orchestrator answers at {args.orchestrator}: {error}; check --orchestrator"
            ) from error
        folder = await asyncio.to_thread(resolve_folder, args.model or model.name, args.cache, console)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        gateway = await Gateway.start(
            orchestrator, tokenizer, model, clock=SystemClock(), host=args.host, port=args.port, caller=caller
        )
        collect_rarely()
        console.print(
            f"gateway of {model.name} at {args.orchestrator}: serving on {args.host}:{gateway.port}", soft_wrap=True
        )
        await stopping.wait()
        await gateway.stop(args.grace)
    return 0
