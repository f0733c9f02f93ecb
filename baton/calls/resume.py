"""The state of one request's stream at its client: the received tokens, the next message, and when to give up.

A server needs only prompt, parameters, seed and the tokens so far to continue a stream, so a lost connection costs a
pause and no tokens. The synchronous and the asyncio stream (baton.calls.streams) share this state. Does no I/O.
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
"""Seconds past the deadline for which a client still reads: the server enforces the deadline, and then sends usage."""


@dataclass(frozen=True)
class Reconnect:
    """Attempts of a client to reach a server that does not answer, and the delays between them."""

    num_connects: int = 3
    """Attempts to send a request to a server that never answered this client, before its error is raised (>= 1)."""
    num_resumes: int = 20
    """Consecutive attempts without a new token to resume a lost stream, or to send a request that a server, which has
    answered before, has not accepted yet (>= 0)."""
    first_delay_s: float = 0.1
    """Seconds before the second attempt; doubles with each attempt."""
    max_delay_s: float = 5.0
    """Seconds between two attempts, at most."""

    def delay_s(self, num_failed: int, fraction: float) -> float:
        """Return the seconds to wait after `num_failed` failures in a row. `fraction`, in [0, 1), spreads clients."""
        return Backoff(self.first_delay_s, self.max_delay_s).after(num_failed) * (0.5 + fraction / 2)


@dataclass
class _Output:
    tokens: list[SampledToken] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class ServerState:
    """State of a server as one client knows it; shared by the client's streams."""

    target: str
    """Address of the server, host:port."""
    was_reached: bool = False
    """True if the server has ever answered: its address is then right, and it is expected to come back."""


class StreamState:
    """A stream's received tokens and remaining attempts. Belongs to the reading thread; any thread may call `fail`."""

    def __init__(
        self,
        request: orchestrator_pb2.GenerateRequest,
        server: ServerState,
        reconnect: Reconnect,
        clock: Clock,
        *,
        deadline_s: float | None = None,
    ) -> None:
        """Start the state of a stream for a copy of `request`. `deadline_s` counts from now."""
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
        """Name of the request, given by the client or else by the server."""
        return self._request.request_id

    @property
    def finish(self) -> FinishReason | None:
        """Why the first choice ended; None while it runs."""
        return self._outputs[0].finish

    def next_request(self) -> orchestrator_pb2.GenerateRequest:
        """Return the message to send now: the request, continued after the received tokens, in the time left."""
        if self._started is not None:
            del self._request.outputs[:]
            for output in self._outputs:
                ids = [token.token_id for token in output.tokens]
                self._request.outputs.append(common_pb2.Output(token_ids=ids))
        if self._end_s is not None:
            self._request.deadline_ms = max(1, round((self._end_s - self._clock.now_s()) * 1000))
        return self._request

    def timeout_s(self) -> float | None:
        """Return the seconds that the call may take; None if it has no limit."""
        return None if self._end_s is None else max(0.0, self._end_s - self._clock.now_s()) + DEADLINE_GRACE_S

    def accept(self, message: orchestrator_pb2.GenerateEvent | None) -> TokenEvent | None:
        """Take a call's next message, or None for the call's end, and return the event to show, if any. Raises a
        BatonError for a message that is wrong, or an end that is too early; pass it to `call_failed`."""
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
        """Take a call's error. Return the seconds after which to send `next_request`; None: the stream is over."""
        if self._has_all and isinstance(error, UnavailableError):
            self._end()  # all tokens came, only the last message was lost
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
        """End the stream with an error, unless it is over."""
        if not self.is_over:
            self._failure = error
            finish = next(finish for finish, kind in _ERROR_OF.items() if isinstance(error, kind))
            for output in self._outputs:
                output.finish = output.finish or finish
            self.is_over = True

    def raise_failure(self) -> None:
        """Raise the error that the stream ended with, if it failed."""
        if self._failure is not None:
            raise self._failure

    def output(self) -> Completion:
        """Return all that has been received so far."""
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
        """Take the server's announcement. A server that continues the stream must use the same model and seed, and be
        exact if the stream was exact so far."""
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
        """End the stream: all choices have ended, some of them perhaps with an error."""
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
"""The error for a stream that a server ended with this finish reason, and without an error status. ERROR, whose class
is the base of all, comes last."""
