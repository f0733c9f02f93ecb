"""The record of a request, and the events of its stream. `orchestrator.requests.states` has a request's states.

Records are made by `orchestrator.scheduler`, changed by it and `orchestrator.dispatch`, and read by
`orchestrator.placement`. Pure.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from baton.errors import BatonError
from baton.process.clock import Clock
from baton.results.completion import Usage
from baton.results.prefill_trace import Placement, PrefillTrace, PrefixFetch, RankTiming, WidthChoice
from baton.results.timings import DraftCounts, SpeculationTrace, Timings
from baton.sampling_params import SamplingParams
from baton.types import DraftRound, FinishReason, RequestId, TokenEvent
from orchestrator.requests.request import Request
from orchestrator.requests.states import TRANSITIONS, RequestMove, RequestState


@dataclass(frozen=True)
class Started:
    """A stream's first event: the request was accepted."""

    request_id: RequestId
    num_prompt_tokens: int
    seed: int
    exact: bool = True
    """True if only generation groups that attend to all tokens may serve the request."""


@dataclass(frozen=True)
class Finished:
    """A stream's last event; every stream has exactly one."""

    reasons: tuple[FinishReason, ...]
    """The reason why each choice ended, including choices that an error ended."""
    usage: Usage
    timings: Timings
    error: BatonError | None = None
    """The error that ended the request before its choices; None when all of them ended by themselves."""


Event = Started | TokenEvent | Finished
"""An event of a stream: one Started, token events, one Finished. A choice's last token event has its finish reason."""


@dataclass
class ChoiceRecord:
    """One of a request's outputs. Owned by the request's task."""

    index: int
    params: SamplingParams
    """Sampling parameters of this choice alone."""
    output_ids: list[int]
    """Tokens that the client has, or will have; the next attempt continues after them."""
    finish: FinishReason | None = None
    num_steps: int = 0
    """Steps of this orchestrator's attempts that brought tokens."""
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    """Drafts that those steps verified, by their source."""
    _num_taken: int = 0
    """Tokens that those steps brought."""

    def add(self, token_id: int, drafts: DraftRound | None) -> None:
        """Take the next token, and the drafts of its step if the token is the last one of a step with drafts."""
        self.output_ids.append(token_id)
        self._num_taken += 1
        self.num_steps += 1
        if drafts is not None:
            self.num_steps -= min(drafts.num_tokens, self._num_taken) - 1  # the client may have had the first ones
            before = self.drafts.get(drafts.source, DraftCounts(drafts.source))
            self.drafts[drafts.source] = before + DraftCounts.of(drafts)

    def end(self, reason: FinishReason, now_ns: int) -> TokenEvent:
        """End the choice without another token, and return the event that reports it."""
        self.finish = reason
        return TokenEvent(len(self.output_ids), None, "", now_ns, reason, choice=self.index)


@dataclass(frozen=True)
class Attempt:
    """State of one attempt at a request. Fields keep their defaults until the attempt reaches the stage that sets
    them."""

    number: int = 1
    leased_ns: int = 0
    """Time at which the attempt had a generation group and, if a chain prefills, its slots."""
    leased_s: float | None = None
    """The same time on the clock's now_s(), by which durations are measured; None before."""
    residency: str = ""
    """Name of the residency policy of the generation group."""
    placement: Placement | None = None
    """Which workers prefill, and why."""
    width: WidthChoice | None = None
    """The choice of the number of prefill ranks; None when the generation group prefills by itself."""
    num_cached_tokens: int = 0
    """Number of first tokens whose KV was cached, so that the prefill begins behind them."""
    fetch: PrefixFetch | None = None
    """The last fetch of cached KV from another node; None when none was tried."""
    ranks: tuple[RankTiming, ...] = ()
    """Timings of the prefill ranks; empty when the generation group prefilled by itself."""
    blamed: Hashable = None
    """Incarnation of the group that failed the attempt; None when no group did."""
    generation: str = ""
    """Name of the generation group; empty before the attempt has one."""
    prefill: str = ""
    """Name of the prefill group whose chain serves the attempt; empty without a chain."""


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed, so that another followed or the request ended."""

    number: int
    unix_ns: int
    error: str
    """Name of the error's class."""
    reason: str
    """Text of the error's message."""


@dataclass
class RequestRecord:
    """Record of an accepted request: its state, its choices, its times. Changed by its methods, in the request's task.

    Its choices share an attempt, and so the prompt's prefill, as long as none of them has a token. A later failure is
    retried choice by choice, as `branches`.
    """

    request: Request
    choices: tuple[ChoiceRecord, ...]
    received_ns: int
    admitted_ns: int = 0
    admitted_s: float = 0.0
    """Time of `admitted_ns` on the clock's now_s(), by which durations are measured."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    first_seen_s: float | None = None
    """Time at which the request's first token was passed on, on the clock's now_s(); None before."""
    state: RequestState = RequestState.QUEUED
    attempt: Attempt = Attempt()
    """The present attempt, or the last one."""
    avoid: set[Hashable] = field(default_factory=set)
    """Incarnations of groups that failed this request."""
    failures: list[FailedAttempt] = field(default_factory=list)
    """Attempts that have failed, those of all branches included, which share this list."""

    @classmethod
    def of(cls, request: Request, received_ns: int) -> Self:
        """Return the record of a new request. Its choices continue after the tokens that the client already has."""
        lists = request.outputs or [()] * request.params.n
        choices = [ChoiceRecord(index, request.params.of_choice(index), list(ids)) for index, ids in enumerate(lists)]
        return cls(request, tuple(choices), received_ns)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def output_ids(self) -> list[int]:
        """Return the tokens after which all choices of an attempt continue; none when there are several choices."""
        return self.choices[0].output_ids if len(self.choices) == 1 else []

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose KV an attempt that starts now has to make."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens over all choices."""
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def wants_prompt_scores(self) -> bool:
        """Return whether the prefill must also score the prompt's tokens; the scores come with the first token."""
        return self.request.params.prompt_logprobs is not None and not self.choices[0].output_ids

    @property
    def is_complete(self) -> bool:
        """Return whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def is_apart(self) -> bool:
        """Return whether one of several choices has tokens or an end, so that each is retried by itself."""
        return len(self.choices) > 1 and any(choice.output_ids or choice.finish for choice in self.choices)

    def advance(self, move: RequestMove) -> None:
        """Move to the state that TRANSITIONS gives for this move, which must be allowed."""
        after = TRANSITIONS.get((self.state, move))
        assert after is not None, f"request {self.request_id}: no {move.value} in state {self.state.value}"
        self.state = after

    def admit(self, clock: Clock) -> None:
        """Record that the request has left the queue now."""
        self.advance(RequestMove.ADMIT)
        self.admitted_ns, self.admitted_s = clock.unix_ns(), clock.now_s()

    def place(self, clock: Clock, placed: Attempt = Attempt()) -> None:
        """Record where the attempt runs, now that it has a generation group and, if a chain prefills, its slots.
        `placed` has the fields that are known by now, except number and times."""
        self.advance(RequestMove.PLACE)
        number, leased_ns, leased_s = self.attempt.number, clock.unix_ns(), clock.now_s()
        self.attempt = replace(placed, number=number, leased_ns=leased_ns, leased_s=leased_s)

    def report(self, ranks: tuple[RankTiming, ...]) -> None:
        """Record the timings of the attempt's prefill ranks."""
        self.attempt = replace(self.attempt, ranks=ranks)

    def blame(self, incarnation: Hashable) -> None:
        """Record that this incarnation of a group has failed the attempt; later attempts avoid it."""
        self.avoid.add(incarnation)
        self.attempt = replace(self.attempt, blamed=incarnation)

    def retry(self) -> None:
        """Record that the attempt has failed and the next begins."""
        self.advance(RequestMove.RETRY)
        self.attempt = Attempt(self.attempt.number + 1)

    def replan(self) -> None:
        """Restart the attempt without counting another, because neither a worker nor the request caused the failure."""
        self.advance(RequestMove.RETRY)
        self.attempt = Attempt(self.attempt.number)

    def accept(self, event: TokenEvent) -> TokenEvent | None:
        """Take an attempt's event into the record, and return it as the client sees it.

        Returns None when the event's choice has already ended. Raises BatonError when the event is not its choice's
        next one.
        """
        if event.choice >= len(self.choices):
            raise BatonError(f"a worker sent choice {event.choice} of {len(self.choices)}: restart it")
        choice = self.choices[event.choice]
        if choice.finish is not None:
            return None
        if event.index != len(choice.output_ids):
            raise BatonError(f"a worker sent token {event.index} where {len(choice.output_ids)} is due: restart it")
        if event.token is not None:
            if self.state is not RequestState.STREAMING:  # false for every token but the first
                self.advance(RequestMove.TOKEN)
            choice.add(event.token.token_id, event.drafts)
            self.first_token_ns = self.first_token_ns or event.unix_ns
            self.last_token_ns = event.unix_ns
        choice.finish = event.finish
        return event if event.choice == choice.index else replace(event, choice=choice.index)

    def end_known(self, now_ns: int) -> list[TokenEvent]:
        """End choices that had ended before the client resumed its stream; return the events that report it."""
        pairs = zip(self.choices, self.request.ended, strict=False)
        return [choice.end(finish, now_ns) for choice, finish in pairs if finish is not None]

    def end_open(self, reason: FinishReason, now_ns: int) -> list[TokenEvent]:
        """End the choices that have not ended, and return the events that report it."""
        return [choice.end(reason, now_ns) for choice in self.choices if choice.finish is None]

    def see_token(self, now_s: float) -> None:
        """Record that a token is passed on now, on the clock's now_s()."""
        self.first_seen_s = now_s if self.first_seen_s is None else self.first_seen_s

    def branches(self) -> "list[RequestRecord]":
        """Return a record for each choice that has not ended; from now on each is retried by itself."""
        return [
            replace(
                self,
                request=self.request.of_choice(choice.index, choice.params),
                choices=(choice,),
                avoid={*self.avoid},
            )
            for choice in self.choices
            if choice.finish is None
        ]

    def merge(self, branches: "Sequence[RequestRecord]") -> None:
        """Take over attempts, the latest placement and token times from the records that `branches` returned."""
        attempts = (each.attempt for each in (self, *branches))
        latest = max(attempts, key=lambda each: (each.leased_s is not None, each.leased_s or 0.0))
        self.attempt = replace(latest, number=max(branch.attempt.number for branch in branches))
        first_ns = [each.first_token_ns for each in (self, *branches) if each.first_token_ns]
        self.first_token_ns = min(first_ns, default=0)
        self.last_token_ns = max(each.last_token_ns for each in (self, *branches))

    def finish(self, now_ns: int, reason: FinishReason | None = None, error: BatonError | None = None) -> Finished:
        """End the request and return its last event: open choices end for `reason`, because of `error` if given."""
        self.advance(RequestMove.FINISH)
        reasons = [choice.finish or reason for choice in self.choices]
        assert None not in reasons, f"request {self.request_id} ends with choices that have not"
        ended = tuple(each for each in reasons if each is not None)
        return Finished(ended, self.usage(), self.timings(now_ns), error)

    def usage(self) -> Usage:
        """Return the tokens and attempts that the request has taken so far."""
        num_prompt = len(self.request.prompt_ids)
        num_cached = min(self.attempt.num_cached_tokens, num_prompt)
        num_output = self.num_output_tokens if self.request.has_output else 0
        return Usage(num_prompt, num_output, self.attempt.number, num_cached)

    def timings(self, finished_ns: int = 0) -> Timings:
        """Return the times of the last attempt so far; `finished_ns` is the instant of the request's end, 0 before."""
        attempt = self.attempt
        return Timings(
            received_ns=self.received_ns,
            admitted_ns=self.admitted_ns,
            leased_ns=attempt.leased_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=finished_ns,
            residency=attempt.residency,
            prefill=PrefillTrace(attempt.placement, attempt.width, attempt.ranks, attempt.fetch),
            speculation=self._speculation(),
        )

    def _speculation(self) -> SpeculationTrace | None:
        """Return the drafts of all choices; None when no step verified any."""
        found: dict[str, DraftCounts] = {}
        for choice in self.choices:
            for source, counts in choice.drafts.items():
                found[source] = found.get(source, DraftCounts(source)) + counts
        num_steps = sum(choice.num_steps for choice in self.choices)
        return SpeculationTrace(num_steps, tuple(found.values())) if found else None
