"""A gRPC channel whose calls carry an API key, for commands."""

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from baton.requests import call_metadata


class _Details(NamedTuple):
    """The details of a call, as gRPC hands them to interceptors."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Keyed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the same metadata to each call of a channel."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def intercept_unary_stream(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def _with_key(self, details: Any) -> _Details:
        metadata = (*(details.metadata or ()), *self._metadata)
        rest = (details.credentials, details.wait_for_ready, details.compression)
        return _Details(details.method, details.timeout, metadata, *rest)


def keyed(channel: grpc.Channel, api_key: str | None) -> grpc.Channel:
    """Return the channel with this API key on each unary call and server stream, or the unchanged channel without a
    key. Raises InvalidArgumentError for a key that cannot be sent."""
    return channel if api_key is None else grpc.intercept_channel(channel, _Keyed(call_metadata(api_key, None)))
