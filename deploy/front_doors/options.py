"""Options of every command that runs a gateway, for any protocol. Also handles the signals that end such a command."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import InvalidArgumentError
from baton.settings.paths import cache_folder

if TYPE_CHECKING:
    import asyncio


def add_front_door(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Add the options that all gateways have, such as the address, the tokenizer and the grace period, to a command.
    `port` is the default port."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    text = "port to listen on; 0: any free port (default: %(default)s)"
    parser.add_argument("--port", type=int, default=port, help=text)
    parser.add_argument(
        "--model",
        help="model whose tokenizer and chat template are used: name, Hugging Face folder, or GGUF file (default: the "
        "name of the served model)",
    )
    text = "folder for converted models (default: %(default)s)"
    parser.add_argument("--cache", type=Path, default=cache_folder(), help=text)
    text = "read the names of control tokens in chat messages as control tokens (default: as text)"
    parser.add_argument("--control-tokens-in-text", action="store_true", help=text)
    text = "time in seconds that running streams have to end at shutdown (default: %(default)g)"
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS", help=text)
    text = "format of log lines (default: text)"
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help=text)
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable with the API key for this command's own calls; needed if the server requires keys. "
        "Clients send their own keys",
    )


def check_front_door(args: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if the port or the grace period is out of range."""
    if not 0 <= args.port < 2**16:
        raise InvalidArgumentError(f"--port {args.port} is out of range: use 0 to {2**16 - 1}")
    if not 0 <= args.grace < float("inf"):
        raise InvalidArgumentError(f"--grace {args.grace:g} is out of range: use 0 seconds, or more")


def stopped_by_signals() -> "asyncio.Event":
    """Return an event that is set by SIGINT and SIGTERM. These signals then no longer end the process. Must be called
    on the asyncio loop."""
    import asyncio  # here and not above, so that --help and mistyped options are answered at once
    import signal

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping
