"""Client-side state of one request's stream: the received tokens, the next message to send, and the remaining attempts.

A server can continue a stream if it gets the prompt, the parameters, the seed and the tokens received so far. A lost
connection therefore delays the stream, but loses no tokens. The synchronous and the asyncio stream
(baton.calls.streams) share this module. Does no I/O.
"""

import random
from dataclasses import dataclass, field, replace

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    DrainedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    VersionMismatchError,
)
from baton.process.backoff import Backoff
from baton.process.clock import Clock
from baton.proto_types import event_from_proto, read, timings_from_proto
from baton.results.completion import Choice, Completion, Usage
from baton.results.timings import Timings
from baton.types import FinishReason, SampledToken, TokenEvent
from baton.v1 import common_pb2, generate_pb2, orchestrator_pb2

DEADLINE_GRACE_S = 1.0
"""Number of seconds after the deadline during which a client continues to read. The server enforces the deadline, and
then sends the token usage in its last message."""


@dataclass(frozen=True)
class Reconnect:
    """Limits and delays of a client's attempts to reconnect to a server."""

    num_connects: int = 3
    """Maximum number of attempts to send a request to a server that has never answered this client (>= 1). After the
    last attempt, the stream raises the error."""
    num_resumes: int = 20
    """Maximum number of consecutive failed attempts without a new token (>= 0), for a server that has answered this
    client before. An attempt either resumes a lost stream, or repeats a request that the server has not accepted
    yet."""
    first_delay_s: float = 0.1
    """Maximum delay in seconds before the second attempt. Each further attempt doubles the maximum."""
    max_delay_s: float = 5.0
    """Maximum delay in seconds before any attempt, unless the server asks for a longer delay."""

    def delay_s(self, num_failed: int, fraction: float) -> float:
        """Return the number of seconds to wait after `num_failed` consecutive failures. `fraction` is a random number
        in [0, 1) that adds jitter, so that many clients do not retry at the same moment."""
        return Backoff(self.first_delay_s, self.max_delay_s).after(num_failed) * (0.5 + fraction / 2)


@dataclass
class _Output:
    tokens: list[SampledToken] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class ServerState:
    """Connection state of a server, from the view of one client. Shared by all streams of the client."""

    target: str
    """Address (host:port) of the server."""
    was_reached: bool = False
    """True if the server has ever answered this client. In this case its address is known to be correct, and the client
    expects the server to recover after a failure."""


class StreamState:
    """State of a stream: the received tokens and the remaining attempts. Used by the thread that reads the stream. Only
    `fail` may be called from any thread."""

    def __init__(
        self,
        request: orchestrator_pb2.GenerateRequest,
        server: ServerState,
        reconnect: Reconnect,
        clock: Clock,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Create the state of a stream for a copy of `request`. `deadline_s` is the deadline in seconds from now."""
        self.num_resumes = 0
        self.is_over = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._server = server
        self._reconnect = reconnect
        self._clock = clock
        self._random = random.Random()  # spreads retries; no token depends on it
        self._end_s = None if deadline_s is None else clock.now_s() + deadline_s
        self._num_failed = 0
        self._started: orchestrator_pb2.Started | None = None
        self._exact: bool | None = None
        self._outputs = [_Output() for _ in range(request.sampling.n or 1)]
        self._prompt: tuple[SampledToken, ...] = ()
        self._failure: BatonError | None = None

    @property
    def request_id(self) -> str:
        """Id of the request: the id that the client chose, or else the id that the server chose."""
        return self._request.request_id

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of the first choice. None while the choice is running."""
        return self._outputs[0].finish

    def next_request(self) -> orchestrator_pb2.GenerateRequest:
        """Return the next message to send. It contains the time that remains until the deadline, and the tokens
        received so far. The server continues the output after these tokens."""
        if self._started is not None:
            del self._request.outputs[:]
            for output in self._outputs:
                ids = [token.token_id for token in output.tokens]
                self._request.outputs.append(common_pb2.Output(token_ids=ids))
        if self._end_s is not None:
            self._request.deadline_ms = max(1, round((self._end_s - self._clock.now_s()) * 1000))
        return self._request

    def timeout_s(self) -> float | None:
        """Return the timeout in seconds for a call that starts now. It ends DEADLINE_GRACE_S seconds after the
        deadline. None: the request has no deadline."""
        return None if self._end_s is None else max(0.0, self._end_s - self._clock.now_s()) + DEADLINE_GRACE_S

    def accept(self, message: orchestrator_pb2.GenerateEvent | None) -> TokenEvent | None:
        """Process a message of the call. `message` is None if the call has ended. Return the event for the user, or
        None if the message contains no event for the user.

        Raises a BatonError if the message is invalid, or if the call ended before the stream was complete. The caller
        must pass this error to `call_failed`.
        """
        kind = None if message is None else message.WhichOneof("event")
        self._server.was_reached |= message is not None
        if message is None:
            self._accept_end()
        elif kind == "started":
            self._accept_started(message.started)
        elif kind == "token":
            return self._accept_token(message.token)
        elif kind == "finished":
            self._accept_finished(message.finished)
        return None  # no event to show, or a kind of event that a newer server sends

    def call_failed(self, error: BatonError) -> float | None:
        """Handle the error of a call. Return the number of seconds to wait before the next attempt, which sends
        `next_request`. None: the stream has ended, and no attempt follows."""
        if self._has_all and isinstance(error, UnavailableError):
            self._end()  # all tokens were received, only the last message was lost
            return None
        self._num_failed += 1
        delay_s = self._reconnect.delay_s(self._num_failed, self._random.random())
        if isinstance(error, ResourceExhaustedError):
            delay_s = max(delay_s, error.retry_after_s or 0.0)
        if not self._may_try_again(error):
            self.fail(self._told(error))
        elif self._end_s is not None and self._clock.now_s() + delay_s >= self._end_s:
            self.fail(DeadlineExceededError(f"deadline passes while {self._server.target} is away: {error}"))
        else:
            self.num_resumes += self._started is not None
            return delay_s
        return None

    def fail(self, error: BatonError) -> None:
        """End the stream with an error, unless it has already ended."""
        if not self.is_over:
            self._failure = error
            finish = next(finish for finish, kind in _ERROR_OF.items() if isinstance(error, kind))
            for output in self._outputs:
                output.finish = output.finish or finish
            self.is_over = True

    def raise_failure(self) -> None:
        """Raise the error that ended the stream. Does nothing if the stream has not failed."""
        if self._failure is not None:
            raise self._failure

    def output(self) -> Completion:
        """Return all output that has been received so far."""
        started = self._started
        return Completion(
            request_id=self.request_id,
            choices=tuple(
                Choice(index, "".join(output.text), tuple(output.tokens), output.finish)
                for index, output in enumerate(self._outputs)
            ),
            prompt=self._prompt,
            model=self._request.model if started is None else started.model,
            seed=None if started is None else started.seed,
            exact=self._exact,
            num_prompt_tokens=None if started is None else started.num_prompt_tokens,
            usage=self.usage,
            timings=self.timings,
            num_resumes=self.num_resumes,
        )

    def _accept_started(self, started: orchestrator_pb2.Started) -> None:
        """Process the server's Started message. A server that continues the stream must use the same model and seed. If
        the stream was exact so far, it must also remain exact."""
        self._started = started
        self._exact = started.exact and self._exact is not False  # tokens from earlier servers count as well
        self._request.exact |= self._exact
        self._request.request_id = started.request_id
        self._request.sampling.seed, self._request.seeded = started.seed, True
        self._request.model = started.model

    @property
    def _has_all(self) -> bool:
        return all(output.finish is not None for output in self._outputs)

    def _accept_token(self, message: generate_pb2.TokenEvent) -> TokenEvent | None:
        event = event_from_proto(message)
        if event.choice >= len(self._outputs):
            raise BatonError(f"{self._server.target} sent choice {event.choice} of {len(self._outputs)}: report this")
        output = self._outputs[event.choice]
        num_tokens = len(output.tokens)
        if event.index > num_tokens:
            raise BatonError(
                f"{self._server.target} left out output tokens {num_tokens} to {event.index - 1}: report this"
            )
        if event.token is not None and event.index < num_tokens:  # the token was received before
            event = replace(event, index=event.index + 1, token=None, text="")
        if output.finish is not None or (event.token is None and event.finish is None):
            return None
        if event.token is not None:
            self._num_failed = 0
            output.tokens.append(event.token)
        output.text.append(event.text)
        output.finish = event.finish
        self._prompt = self._prompt or event.prompt
        return event

    def _accept_finished(self, message: orchestrator_pb2.Finished) -> None:
        if not self._has_all:
            raise VersionMismatchError(
                f"{self._server.target} finished a request whose choices have not all ended: run one version of Baton "
                "on all sides"
            )
        self.usage, self.timings = read(Usage, message.usage), timings_from_proto(message.timings)

    def _accept_end(self) -> None:
        if self.usage is None:
            raise UnavailableError(f"{self._server.target} ended the stream without its last message")
        self._end()

    def _end(self) -> None:
        """End the stream because all choices have ended. Some of them may have ended with an error."""
        self.is_over = True
        for output in self._outputs:
            error = None if output.finish is None else _ERROR_OF.get(output.finish)
            if error is not None and output.finish is not None and self._failure is None:
                self._failure = error(f"{self._server.target} ended request {self.request_id}: {output.finish.value}")

    def _may_try_again(self, error: BatonError) -> bool:
        if self._has_all or isinstance(error, DrainedError):
            return False
        if self._started is None and not isinstance(error, UnavailableError):
            return False
        if self._started is None and self._num_failed < self._reconnect.num_connects:
            return True
        if not self._server.was_reached:
            return False
        away = isinstance(error, UnavailableError | ResourceExhaustedError)
        return away and self._num_failed <= self._reconnect.num_resumes

    def _told(self, error: BatonError) -> BatonError:
        if not isinstance(error, UnavailableError) or isinstance(error, DrainedError):
            return error
        told = UnavailableError(
            f"{self._server.target} cannot be reached, or cannot serve ({self._num_failed} attempts): {error}; "
            "check that a Baton server runs there"
        )
        told.__cause__ = error
        return told


_ERROR_OF: dict[FinishReason, type[BatonError]] = {
    FinishReason.CANCELLED: RequestCancelledError,
    FinishReason.DEADLINE: DeadlineExceededError,
    FinishReason.ERROR: BatonError,
}
"""Exception class for each finish reason of a failed stream. An exception gets the finish reason of the first entry
whose class matches (isinstance). BatonError is last, because it is the base class of the others."""
