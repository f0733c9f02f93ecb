"""A channel to a cluster that runs: what commands that ask its orchestrator begin with."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.errors import UnavailableError

if TYPE_CHECKING:
    import grpc

_CONNECT_S = 5.0


@contextlib.contextmanager
def admin_channel(target: str) -> Iterator["grpc.Channel"]:
    """Connected. Raises UnavailableError when nobody answers at `target`."""
    import grpc  # here: --help and mistyped options are answered without it

    with grpc.insecure_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError:
            remedy = "name one that is served, or check --target"
            raise UnavailableError(f"no orchestrator answers at {target} within {_CONNECT_S:g} s: {remedy}") from None
        yield channel
