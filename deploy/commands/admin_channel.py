"""gRPC channel from a command to the orchestrator of a running cluster. Each call contains the cluster's secret and, if
the command has one, the operator's API key."""

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from baton.errors import UnavailableError
from deploy.config.environment import SECRET_VARIABLE, read_variable

if TYPE_CHECKING:
    import grpc

    from baton.transport.identity import ClusterSecret

_CONNECT_S = 5.0


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add arguments to a command that select a running cluster: its name or, alternatively, the option --target with
    its address."""
    parser.add_argument("name", nargs="?", default="baton", help="name of the cluster (default: baton)")
    where = f"address of the orchestrator, if it runs on another machine; the variable {SECRET_VARIABLE} must contain"
    text = f"{where} the cluster's secret"
    parser.add_argument("--target", metavar="HOST:PORT", help=text)


def add_timeout(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option --timeout to a command. `text` is the option's help text."""
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=text)


def add_key_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --api-key-env, which names the environment variable with the operator's API key, to a command."""
    text = "environment variable with an operator's API key; needed if the cluster requires API keys"
    parser.add_argument("--api-key-env", metavar="VARIABLE", help=text)


def given_key(args: argparse.Namespace) -> str | None:
    """Return the API key from the environment variable that --api-key-env names, or None if the option is not given.
    Raises ConfigError if the variable is not set."""
    return None if args.api_key_env is None else read_variable(args.api_key_env)


def cluster_channel(args: argparse.Namespace) -> AbstractContextManager["grpc.Channel"]:
    """Return a context manager that connects to the cluster that the command's options name (see `admin_channel`).
    Raises ConfigError if the cluster does not run on this machine, and UnavailableError while the cluster is
    starting."""
    from deploy.commands.record import secret_for, serving_endpoint

    target = args.target or serving_endpoint(args.name)
    return admin_channel(target, secret_for(args.target, args.name), given_key(args))


@contextlib.contextmanager
def admin_channel(target: str, secret: "ClusterSecret", api_key: str | None = None) -> Iterator["grpc.Channel"]:
    """Context manager. Connect to the orchestrator at `target`, and yield a channel that adds the secret and the API
    key to each call. gRPC errors in the block are converted to BatonErrors. Raises UnavailableError if no orchestrator
    answers within 5 s."""
    import grpc  # imported here, so that --help and mistyped options are answered without grpc

    from baton.channel_options import Keepalive, channel_options
    from baton.rpc_status import translate_rpc_errors
    from deploy.commands.keyed_channel import keyed

    with grpc.insecure_channel(target, options=channel_options(Keepalive())) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError:
            remedy = "name one that is served, or check --target"
            raise UnavailableError(f"no orchestrator answers at {target} within {_CONNECT_S:g} s: {remedy}") from None
        with translate_rpc_errors():
            yield keyed(channel, api_key, secret)
