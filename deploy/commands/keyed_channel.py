"""gRPC channel for commands that adds the cluster's secret and an API key to each call."""

from collections.abc import Callable
from typing import Any

import grpc

from baton.calls.requests import call_metadata
from baton.transport.identity import ClusterSecret


class _Keyed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """gRPC interceptor that adds the same metadata to each call of a channel."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(self._with_metadata(details), request)

    def intercept_unary_stream(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(self._with_metadata(details), request)

    def _with_metadata(self, details: Any) -> Any:
        """Return a copy of `details`, gRPC's description of a call (a named tuple), with the metadata added."""
        return details._replace(metadata=(*(details.metadata or ()), *self._metadata))


def keyed(channel: grpc.Channel, api_key: str | None, secret: ClusterSecret) -> grpc.Channel:
    """Return a channel that adds the cluster's secret, and the API key unless it is None, to each unary call and server
    stream. Raises InvalidArgumentError if the key contains characters that gRPC metadata does not allow."""
    keys = () if api_key is None else call_metadata(api_key, None)
    return grpc.intercept_channel(channel, _Keyed((*keys, *secret.metadata)))
