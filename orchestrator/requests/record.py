"""Record of a request's progress, and the events of its stream. The states of a request are in
`orchestrator.requests.states`.

Records are created by `orchestrator.scheduler`, changed by it and by `orchestrator.dispatch`, and read by
`orchestrator.placement`. Does no I/O.
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
    """First event of a request's stream. It reports that the request was accepted."""

    request_id: RequestId
    num_prompt_tokens: int
    seed: int
    exact: bool = True
    """True if only generation groups that attend to all tokens may serve the request."""


@dataclass(frozen=True)
class Finished:
    """Last event of a stream. Every stream has exactly one."""

    reasons: tuple[FinishReason, ...]
    """Finish reason of each choice. Choices that were ended by an error are included."""
    usage: Usage
    timings: Timings
    error: BatonError | None = None
    """Error that ended the request before all choices were complete; None if all choices ended normally."""


Event = Started | TokenEvent | Finished
"""Event of a request's stream. A stream has one Started event, any number of token events, and one Finished event. The
last token event of a choice has the finish reason of the choice."""


@dataclass
class ChoiceRecord:
    """State of one choice of a request. Only the request's task changes it."""

    index: int
    params: SamplingParams
    """Sampling parameters of this choice."""
    output_ids: list[int]
    """Output tokens that have been sent to the client or are about to be sent. The next attempt continues after these
    tokens."""
    finish: FinishReason | None = None
    num_steps: int = 0
    """Number of decode steps that produced tokens of this choice. Steps that an earlier orchestrator process counted
    are not included."""
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    """Number of proposed and number of accepted draft tokens, by draft source, in the steps that `num_steps` counts."""
    _num_taken: int = 0
    """Number of tokens produced by the steps that `num_steps` counts."""

    def add(self, token_id: int, drafts: DraftRound | None) -> None:
        """Append the next token. `drafts` is the result of speculative decoding in the token's step. It is given
        with the last token of a step that verified drafts, and is None for all other tokens."""
        self.output_ids.append(token_id)
        self._num_taken += 1
        self.num_steps += 1
        if drafts is not None:
            self.num_steps -= min(drafts.num_tokens, self._num_taken) - 1  # some tokens may predate this record
            before = self.drafts.get(drafts.source, DraftCounts(drafts.source))
            self.drafts[drafts.source] = before + DraftCounts.of(drafts)

    def end(self, reason: FinishReason, now_ns: int) -> TokenEvent:
        """End the choice without another token, and return the event that reports the end."""
        self.finish = reason
        return TokenEvent(len(self.output_ids), None, "", now_ns, reason, choice=self.index)


@dataclass(frozen=True)
class Attempt:
    """State of one attempt at a request. Fields keep their defaults until the attempt reaches the stage that sets
    them."""

    number: int = 1
    leased_ns: int = 0
    """Time at which the attempt was placed: a generation group was selected and, if a chain prefills, slots of this
    group were leased. Unix time in nanoseconds; 0 until the attempt is placed."""
    leased_s: float | None = None
    """Time at which the attempt was placed, as a value of `Clock.now_s()`. Same instant as `leased_ns`, used to measure
    durations. None until the attempt is placed."""
    residency: str = ""
    """Name of the generation group's residency policy, which decides where KV is stored."""
    placement: Placement | None = None
    """Decision whether a chain or the generation group prefills, with its reason."""
    width: WidthChoice | None = None
    """Selected number of prefill ranks; None if the generation group prefills by itself."""
    num_cached_tokens: int = 0
    """Number of leading tokens whose KV was in a prefix cache. The prefill starts after these tokens."""
    fetch: PrefixFetch | None = None
    """Most recent fetch of cached KV from another node; None if no fetch was made."""
    ranks: tuple[RankTiming, ...] = ()
    """Timings of the prefill ranks; empty if the generation group prefilled by itself."""
    blamed: Hashable = None
    """Incarnation of the group that made the attempt fail; None if no group did. A group gets a new incarnation each
    time it is repaired or replaced."""
    generation: str = ""
    """Name of the generation group; empty until one is selected."""
    prefill: str = ""
    """Name of the prefill group whose chain serves the attempt; empty if no chain is used."""


@dataclass(frozen=True)
class FailedAttempt:
    """Attempt at a request that failed. After it, the request was either attempted again or ended."""

    number: int
    unix_ns: int
    error: str
    """Class name of the error that made the attempt fail."""
    reason: str
    """Message of the error that made the attempt fail."""


@dataclass
class RequestRecord:
    """Record of an accepted request: its state, its choices and its times. Its methods are called in the request's
    task.

    As long as no choice has a token, all choices share one attempt and one prefill. After that, a request that fails is
    split by `branches`, and each choice is retried separately.
    """

    request: Request
    choices: tuple[ChoiceRecord, ...]
    received_ns: int
    admitted_ns: int = 0
    admitted_s: float = 0.0
    """Time at which the request left the queue, as a value of `Clock.now_s()`. Used to measure durations. Same instant
    as `admitted_ns`."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    first_seen_s: float | None = None
    """Time at which the request's first token was passed to the client, as a value of `Clock.now_s()`; None before
    the first token."""
    state: RequestState = RequestState.QUEUED
    attempt: Attempt = Attempt()
    """Attempt that is running, or the last attempt if the request has ended."""
    avoid: set[Hashable] = field(default_factory=set)
    """Incarnations of the groups that have made an attempt at this request fail. Later attempts avoid these groups."""
    failures: list[FailedAttempt] = field(default_factory=list)
    """Failed attempts at the request. The records that `branches` returns share this list."""

    @classmethod
    def of(cls, request: Request, received_ns: int) -> Self:
        """Return the record of a new request. Each choice continues after the output tokens that the client already
        has."""
        lists = request.outputs or [()] * request.params.n
        choices = [ChoiceRecord(index, request.params.of_choice(index), list(ids)) for index, ids in enumerate(lists)]
        return cls(request, tuple(choices), received_ns)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def output_ids(self) -> list[int]:
        """Return the existing output tokens, after which the next attempt continues. Return an empty list if the
        request has several choices."""
        return self.choices[0].output_ids if len(self.choices) == 1 else []

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens whose KV an attempt must compute or load if it starts now: prompt tokens plus
        existing output tokens."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens, summed over all choices."""
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def wants_prompt_scores(self) -> bool:
        """Return True if the prefill must also return the log-probabilities of the prompt's tokens. They are sent with
        the first output token."""
        return self.request.params.prompt_logprobs is not None and not self.choices[0].output_ids

    @property
    def is_complete(self) -> bool:
        """Return True if all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def is_apart(self) -> bool:
        """Return True if each choice must be retried separately. This is the case if the request has several choices,
        and at least one of them has tokens or has ended."""
        return len(self.choices) > 1 and any(choice.output_ids or choice.finish for choice in self.choices)

    def advance(self, move: RequestMove) -> None:
        """Change the state by this move, as defined in TRANSITIONS. The move must be allowed in the present state."""
        after = TRANSITIONS.get((self.state, move))
        assert after is not None, f"request {self.request_id}: no {move.value} in state {self.state.value}"
        self.state = after

    def admit(self, clock: Clock) -> None:
        """Record that the request leaves the queue at this moment."""
        self.advance(RequestMove.ADMIT)
        self.admitted_ns, self.admitted_s = clock.unix_ns(), clock.now_s()

    def place(self, clock: Clock, placed: Attempt = Attempt()) -> None:
        """Record on which groups the attempt runs. Call it when a generation group is selected and, if a chain
        prefills, slots of this group are leased.

        `placed` has the fields that are known so far. Its number and its times are ignored; this method sets them.
        """
        self.advance(RequestMove.PLACE)
        number, leased_ns, leased_s = self.attempt.number, clock.unix_ns(), clock.now_s()
        self.attempt = replace(placed, number=number, leased_ns=leased_ns, leased_s=leased_s)

    def report(self, ranks: tuple[RankTiming, ...]) -> None:
        """Store the timings of the attempt's prefill ranks."""
        self.attempt = replace(self.attempt, ranks=ranks)

    def blame(self, incarnation: Hashable) -> None:
        """Record that this incarnation of a group made the attempt fail. Later attempts at the request avoid it."""
        self.avoid.add(incarnation)
        self.attempt = replace(self.attempt, blamed=incarnation)

    def retry(self) -> None:
        """Record that the attempt has failed and that the next attempt begins."""
        self.advance(RequestMove.RETRY)
        self.attempt = Attempt(self.attempt.number + 1)

    def replan(self) -> None:
        """Restart the attempt without counting it as a failed one. Used when neither a worker nor the request caused
        the failure."""
        self.advance(RequestMove.RETRY)
        self.attempt = Attempt(self.attempt.number)

    def accept(self, event: TokenEvent) -> TokenEvent | None:
        """Record an event of the attempt. Return the event with its choice index replaced by the index that the client
        uses.

        Returns None if the event's choice has already ended. Raises BatonError if the event is not the next event of
        its choice.
        """
        if event.choice >= len(self.choices):
            raise BatonError(f"a worker sent choice {event.choice} of {len(self.choices)}: restart it")
        choice = self.choices[event.choice]
        if choice.finish is not None:
            return None
        if event.index != len(choice.output_ids):
            raise BatonError(f"a worker sent token {event.index} where {len(choice.output_ids)} is due: restart it")
        if event.token is not None:
            if self.state is not RequestState.STREAMING:  # true only for the attempt's first token
                self.advance(RequestMove.TOKEN)
            choice.add(event.token.token_id, event.drafts)
            self.first_token_ns = self.first_token_ns or event.unix_ns
            self.last_token_ns = event.unix_ns
        choice.finish = event.finish
        return event if event.choice == choice.index else replace(event, choice=choice.index)

    def end_known(self, now_ns: int) -> list[TokenEvent]:
        """End the choices that the request reports as ended (`Request.ended`): they ended before the client resumed the
        stream. Return the events that report these ends to the client."""
        pairs = zip(self.choices, self.request.ended, strict=False)
        return [choice.end(finish, now_ns) for choice, finish in pairs if finish is not None]

    def end_open(self, reason: FinishReason, now_ns: int) -> list[TokenEvent]:
        """End all choices that have not ended yet, with the finish reason `reason`. Return the events that report these
        ends to the client."""
        return [choice.end(reason, now_ns) for choice in self.choices if choice.finish is None]

    def see_token(self, now_s: float) -> None:
        """Record that a token is passed to the client at `now_s`. Only the first call has an effect."""
        self.first_seen_s = now_s if self.first_seen_s is None else self.first_seen_s

    def branches(self) -> "list[RequestRecord]":
        """Return a separate record for each choice that has not ended. Each of these records is then retried
        separately."""
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
        """Update this record from the records that `branches` has returned: the number of attempts, the latest attempt,
        and the times of the first and last token."""
        attempts = (each.attempt for each in (self, *branches))
        latest = max(attempts, key=lambda each: (each.leased_s is not None, each.leased_s or 0.0))
        self.attempt = replace(latest, number=max(branch.attempt.number for branch in branches))
        first_ns = [each.first_token_ns for each in (self, *branches) if each.first_token_ns]
        self.first_token_ns = min(first_ns, default=0)
        self.last_token_ns = max(each.last_token_ns for each in (self, *branches))

    def finish(self, now_ns: int, reason: FinishReason | None = None, error: BatonError | None = None) -> Finished:
        """End the request and return its last event. Choices that have not ended get the finish reason `reason`;
        `error` is the error that ended them, if any."""
        self.advance(RequestMove.FINISH)
        reasons = [choice.finish or reason for choice in self.choices]
        assert None not in reasons, f"request {self.request_id} ends with choices that have not"
        ended = tuple(each for each in reasons if each is not None)
        return Finished(ended, self.usage(), self.timings(now_ns), error)

    def usage(self) -> Usage:
        """Return the number of tokens and attempts that the request has used so far."""
        num_prompt = len(self.request.prompt_ids)
        num_cached = min(self.attempt.num_cached_tokens, num_prompt)
        num_output = self.num_output_tokens if self.request.has_output else 0
        return Usage(num_prompt, num_output, self.attempt.number, num_cached)

    def timings(self, finished_ns: int = 0) -> Timings:
        """Return the request's times and the stages of its last attempt. `finished_ns` is the time at which the request
        ended; 0 if it has not ended."""
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
        """Return the counts of verified drafts, summed over all choices; None if no step verified drafts."""
        found: dict[str, DraftCounts] = {}
        for choice in self.choices:
            for source, counts in choice.drafts.items():
                found[source] = found.get(source, DraftCounts(source)) + counts
        num_steps = sum(choice.num_steps for choice in self.choices)
        return SpeculationTrace(num_steps, tuple(found.values())) if found else None
