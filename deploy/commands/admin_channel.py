"""A channel to a cluster that runs: what commands that ask its orchestrator begin with. Calls on it carry the
operator's key, if the command was given one."""

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.config.worker import read_variable

if TYPE_CHECKING:
    import grpc

_CONNECT_S = 5.0


def add_key_option(parser: argparse.ArgumentParser) -> None:
    """Adds --api-key-env, for commands of operators."""
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="environment variable with an operator's API key, for a cluster that has such keys",
    )


def given_key(args: argparse.Namespace) -> str | None:
    """Return the key that the command was given, or None. Raises ConfigError for a variable that is not set."""
    return None if args.api_key_env is None else read_variable(args.api_key_env)


@contextlib.contextmanager
def admin_channel(target: str, api_key: str | None = None) -> Iterator["grpc.Channel"]:
    """Connected; calls say that they are of the holder of this key. Raises UnavailableError when nobody answers at
    `target`."""
    import grpc  # here, as below: --help and mistyped options are answered without it

    from deploy.commands.keyed_channel import keyed

    with grpc.insecure_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError:
            remedy = "name one that is served, or check --target"
            raise UnavailableError(f"no orchestrator answers at {target} within {_CONNECT_S:g} s: {remedy}") from None
        yield keyed(channel, api_key)
