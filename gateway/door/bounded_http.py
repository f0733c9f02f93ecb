"""uvicorn's HTTP protocol with limits on the memory of a connection, and on the time without progress. Runs on the
asyncio loop.

If a client exceeds a time limit, its connection is closed without an answer. Its request is then cancelled, as if the
client had disconnected.
"""

import asyncio
import json
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.errors import BatonError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from baton.limits import BODY_S, HEADERS_S, MAX_CONNECTIONS, MAX_HEADER_BYTES, WRITE_S
from gateway.errors import HeadersTooLongError, error_body, status_of


class BoundedProtocol(HttpToolsProtocol):
    """HTTP connection with limits. uvicorn makes an object for each connection and calls its methods."""

    def __init__(self, *args: Any, max_of_address: int = 0, **options: Any) -> None:
        """Make a connection. `max_of_address` is the maximum number of connections from one address; 0: no limit."""
        super().__init__(*args, **options)
        self._max_of_address = max_of_address
        self._is_in_head = True
        self._num_head_bytes = 0
        """Number of bytes that were received of the current request's head (request line and headers). It is counted
        only until the head is complete."""
        self._num_parsed_bytes = 0
        """Number of bytes of the current request's URL and complete headers, as counted by the parser. This number has
        the same limit as `_num_head_bytes`. Both are checked, because `_num_head_bytes` omits the data that arrives
        together with the end of the head, in one call of `data_received`."""
        self._answering: RequestResponseCycle | None = None
        """Request whose answer was begun last. `cycle`, the newest request, may wait until this one is answered."""
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the headers of the first request. If there are too many connections, refuse this one
        with an error."""
        super().connection_made(transport)
        self._await(HEADERS_S)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(UnavailableError(f"{MAX_CONNECTIONS} connections are open: close some, or try again"))
        elif self._max_of_address and self._num_of_address() > self._max_of_address:
            text = f"{self._max_of_address} connections from this address are open: close some, or try again"
            self._refuse(ResourceExhaustedError(text))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the connection, and cancel its running request, because the connection has ended."""
        self._stop_waiting()
        self._stop_watching()
        if self._answering is not None:  # uvicorn only cancels the newest request
            self._answering.disconnected = not self._answering.response_complete
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data. If the headers are incomplete and exceed the limit in bytes, refuse the request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            self._check_head(self._num_head_bytes)

    def on_message_begin(self) -> None:
        """Set the count of header bytes to 0, and start the timeout for the headers, because a new request begins."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes, self._num_parsed_bytes = True, 0, 0
        self._await(HEADERS_S)

    def on_url(self, url: bytes) -> None:
        """Pass on a part of the URL, unless the URL exceeds the limit in bytes. If it does, refuse the request."""
        self._num_parsed_bytes += len(url)
        self._check_head(self._num_parsed_bytes)
        if not self.transport.is_closing():
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header, unless the URL and the headers so far exceed the limit in bytes. If they do, refuse the
        request."""
        self._num_parsed_bytes += len(name) + len(value)
        self._check_head(self._num_parsed_bytes)
        if not self.transport.is_closing():
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the timeout for the request's body, because the headers are complete."""
        self._is_in_head = False
        if not self.transport.is_closing():
            self._await(BODY_S)
            super().on_headers_complete()
            if not self.pipeline:
                self._answering = self.cycle
            if self.scope["http_version"] == "1.0":
                _leave_unchunked(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the request's body, and start the timeout for the next part. After the answer, the timeout
        is not started again."""
        if not self.transport.is_closing():
            if not self.cycle.response_complete:
                self._await(BODY_S)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timeout for the request, because the request is complete. If it is already answered, start the
        timeout for the next request."""
        if not self.transport.is_closing():
            self._stop_waiting()
            if self.cycle.response_complete:
                self._await_request()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the timeout for the data that must come next: the rest of the body, which is received but not used, or
        the next request. If the headers of the next request are already arriving, their timeout stays."""
        if not self._is_in_head:
            self._stop_waiting()
            if self.cycle.more_body:
                self._await(BODY_S)
            elif self.cycle.response_complete:
                self._await_request()
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not a request in HTTP. uvicorn calls this method."""
        self._refuse(InvalidArgumentError(f"{msg} Send a request in HTTP/1.1"))

    def pause_writing(self) -> None:
        """Begin to check at intervals whether the client reads data from the send buffer. uvicorn calls this method
        when the buffer is full."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """End the checks that `pause_writing` has begun. uvicorn calls this method when the send buffer has enough free
        space again."""
        self._stop_watching()
        super().resume_writing()

    def _await(self, seconds: float) -> None:
        self._stop_waiting()
        self._reading = self.loop.call_later(seconds, self._late, seconds)

    def _await_request(self) -> None:
        """Start the timeout for the next request. uvicorn also starts one after a response, but any data ends that one,
        also the rest of a body, or an empty line."""
        self._reading = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _late(self, seconds: float) -> None:
        """Disconnect a client that sent no data in time, unless the gateway itself has paused reading."""
        if self.flow.read_paused:
            self._await(seconds)
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch(self, num_waiting: int) -> None:
        self._writing = self.loop.call_later(WRITE_S, self._look, num_waiting)

    def _look(self, num_waiting: int) -> None:
        """Disconnect a client that has read no data since the last check."""
        left = self.transport.get_write_buffer_size()
        if left >= num_waiting:
            self.transport.abort()
        else:
            self._watch(left)

    def _stop_watching(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > MAX_HEADER_BYTES:
            text = f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer, or a shorter key"
            self._refuse(HeadersTooLongError(text))

    def _num_of_address(self) -> int:
        """Return the number of connections that the address of this connection's client has open."""
        own = self.client and self.client[0]
        protocols = [each for each in self.connections if isinstance(each, BoundedProtocol)]
        return sum((each.client and each.client[0]) == own for each in protocols)

    def _refuse(self, error: BatonError) -> None:
        """Answer with an error in OpenAI's format, and close the connection. If another answer has begun, or
        other requests wait for theirs, only close the connection."""
        if self.transport.is_closing():
            return
        cycle = self._answering
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.close()
            return
        body = json.dumps(error_body(error)).encode()
        head = f"HTTP/1.1 {status_of(error)} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _leave_unchunked(cycle: RequestResponseCycle) -> None:
    """Make an answer of unknown length end with its connection, because clients of HTTP/1.0 do not support chunked
    transfer."""
    send, has_length = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks the length
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def allow_connections() -> None:
    """Raise this process's soft limit on open files to the hard limit. Each connection needs an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
