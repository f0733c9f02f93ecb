"""A request's life: states, one transition table, its record, and what its stream says.

    QUEUED -> PLACING -> PREFILLING -> STREAMING -> FINISHED
                 ^           |             |
                 +-----------+-------------+      an attempt failed, the next begins
    every state before FINISHED may go there at once, and nothing leads out of it: one end, exactly

Steps 2 to 9 of a request's way (DESIGN.md, section 4), as the orchestrator sees them. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Self

from baton.errors import BatonError
from baton.ids import RequestId
from baton.results import Placement, RankTiming, Timings, Usage, WidthChoice
from baton.sampling_params import SamplingParams
from baton.types import FinishReason, TokenEvent
from orchestrator.requests.tenants import DEFAULT_TENANT, Tenant


class RequestState(Enum):
    """Where a request is."""

    QUEUED = "queued"
    PLACING = "placing"
    """Has left the queue; gets its groups and its slot."""
    PREFILLING = "prefilling"
    """Has a generation group; this attempt has made no token yet."""
    STREAMING = "streaming"
    FINISHED = "finished"


class RequestMove(Enum):
    """What happens to a request."""

    ADMIT = "admit"
    PLACE = "place"
    TOKEN = "token"
    RETRY = "retry"
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[RequestState, RequestMove], RequestState] = MappingProxyType(
    {
        (RequestState.QUEUED, RequestMove.ADMIT): RequestState.PLACING,
        (RequestState.PLACING, RequestMove.PLACE): RequestState.PREFILLING,
        (RequestState.PREFILLING, RequestMove.TOKEN): RequestState.STREAMING,
        (RequestState.STREAMING, RequestMove.TOKEN): RequestState.STREAMING,
        (RequestState.PLACING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.PREFILLING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.STREAMING, RequestMove.RETRY): RequestState.PLACING,
        (RequestState.QUEUED, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.PLACING, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.PREFILLING, RequestMove.FINISH): RequestState.FINISHED,
        (RequestState.STREAMING, RequestMove.FINISH): RequestState.FINISHED,
    }
)
"""Every move that may be made; any other is a bug of ours."""


@dataclass(frozen=True)
class Started:
    """A stream's first event: the request was taken."""

    request_id: RequestId
    num_prompt_tokens: int
    seed: int
    exact: bool = True
    """Whether only groups may serve it that attend to all tokens."""


@dataclass(frozen=True)
class Finished:
    """A stream's one last event."""

    reasons: tuple[FinishReason, ...]
    """Why each choice ended, those included that an error ended."""
    usage: Usage
    timings: Timings
    error: BatonError | None = None
    """Why the request ended before all of its choices had; None when they have."""


Event = Started | TokenEvent | Finished
"""What a stream says: one Started, any number of tokens, one Finished. A choice's last token says that it is that."""


class Blamed(set[object]):
    """Lives of groups that failed a request, and which of them did so last."""

    latest: object | None = None

    def add(self, life: object) -> None:
        super().add(life)
        self.latest = life


@dataclass
class Choice:
    """One of a request's outputs. Owned by the request's task."""

    index: int
    params: SamplingParams
    """Of this choice alone."""
    output_ids: list[int]
    """Tokens that the client has, or will have: what the next attempt goes on after."""
    finish: FinishReason | None = None

    def end(self, reason: FinishReason, now_ns: int) -> TokenEvent:
        """Ends it without another token; the event that says so."""
        self.finish = reason
        return TokenEvent(len(self.output_ids), None, "", now_ns, reason, choice=self.index)


@dataclass
class RequestRecord:
    """All that is known of a request that was taken. Owned by the request's task.

    Its choices share an attempt, and so the prompt's prefill, as long as none of them has a token. What fails later is
    tried again choice by choice, as `branches`.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Of all choices."""
    choices: tuple[Choice, ...]
    received_ns: int
    resumed: bool = False
    """Whether an earlier orchestrator had it, so that a generation group may still run it."""
    num_given: int = 0
    """Output tokens, of all choices, that the client had when it came."""
    forecast_s: float = 0.0
    """Seconds that were predicted from its turn to its first token, when it came; 0 when nobody asked, or knew."""
    first_seen_ns: int = 0
    """When its first token was passed on, by the orchestrator's own clock."""
    admitted_ns: int = 0
    leased_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    ranks: tuple[RankTiming, ...] = ()
    """Empty when the generation group prefilled by itself."""
    width: WidthChoice | None = None
    """Why this attempt's prefill has the ranks that it has; likewise None."""
    placement: Placement | None = None
    """Who prefills in this attempt, and why; None before that is decided."""
    by_chain: bool = False
    """Whether a chain is to prefill, if there is one, whoever is faster."""
    exact: bool = False
    """Whether only groups may serve it that attend to all tokens: its client asked for that, or was told so."""
    residency: str = ""
    """The policy of this attempt's generation group."""
    tenant: Tenant = DEFAULT_TENANT
    """Whose it is."""
    prefix_salt: str = ""
    """Shares cached prefixes with requests of the same salt only."""
    num_cached_tokens: int = 0
    """Tokens that this attempt's chain begins behind, as their KV was there."""
    attempt: int = 1
    state: RequestState = RequestState.QUEUED
    avoid: Blamed = field(default_factory=Blamed)
    """Lives of groups that failed this request."""

    @classmethod
    def of(
        cls,
        request_id: RequestId,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        received_ns: int,
        *,
        outputs: Sequence[Sequence[int]] = (),
    ) -> Self:
        """A request whose client has `outputs`, one list a choice; none for a new one."""
        lists = outputs or [()] * params.n
        choices = tuple(Choice(index, params.of_choice(index), list(ids)) for index, ids in enumerate(lists))
        num_given = sum(len(ids) for ids in lists)
        return cls(request_id, prompt_ids, params, choices, received_ns, resumed=bool(outputs), num_given=num_given)

    @property
    def output_ids(self) -> list[int]:
        """What all choices of an attempt go on after: with several, nothing."""
        return self.choices[0].output_ids if len(self.choices) == 1 else []

    @property
    def num_slots(self) -> int:
        """Slots that an attempt needs: one a choice."""
        return len(self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV an attempt that starts now has to make."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_output_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that each of the request's slots must hold at its end."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether whoever prefills has to score the prompt, too: the scores come with the first token."""
        return self.params.prompt_logprobs is not None and not self.choices[0].output_ids

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def is_apart(self) -> bool:
        """Whether the choices no longer have only the prompt in common."""
        return len(self.choices) > 1 and any(choice.output_ids or choice.finish for choice in self.choices)

    def advance(self, move: RequestMove) -> None:
        """Makes a move of the table."""
        after = TRANSITIONS.get((self.state, move))
        assert after is not None, f"request {self.request_id}: no {move.value} in state {self.state.value}"
        self.state = after

    def admit(self, now_ns: int) -> None:
        """The request has left the queue."""
        self.advance(RequestMove.ADMIT)
        self.admitted_ns = now_ns

    def place(self, now_ns: int, residency: str = "") -> None:
        """The request has a generation group, of that policy, and, if it is prefilled elsewhere, its slots."""
        self.advance(RequestMove.PLACE)
        self.leased_ns, self.residency = now_ns, residency

    def retry(self) -> None:
        """The attempt has failed; the next begins."""
        self.advance(RequestMove.RETRY)
        self.attempt += 1

    def replan(self) -> None:
        """The attempt begins anew, because of what nobody is to blame for: it is not counted."""
        self.advance(RequestMove.RETRY)

    def accept(self, event: TokenEvent) -> TokenEvent | None:
        """Takes an attempt's event into the record; returns it as the client is to see it, None for what it knows.
        Raises BatonError when it is not the choice's next one."""
        if event.choice >= len(self.choices):
            raise BatonError(f"a worker sent choice {event.choice} of {len(self.choices)}: restart it")
        choice = self.choices[event.choice]
        if choice.finish is not None:
            return None
        if event.index != len(choice.output_ids):
            raise BatonError(f"a worker sent token {event.index} where {len(choice.output_ids)} is due: restart it")
        if event.token is not None:
            if self.state is not RequestState.STREAMING:  # as every token but the first finds it
                self.advance(RequestMove.TOKEN)
            choice.output_ids.append(event.token.token_id)
            self.first_token_ns = self.first_token_ns or event.unix_ns
            self.last_token_ns = event.unix_ns
        choice.finish = event.finish
        return event if event.choice == choice.index else replace(event, choice=choice.index)

    def branches(self) -> "list[RequestRecord]":
        """A record for each choice that has not ended, on its own from here on."""
        return [
            replace(
                self,
                request_id=RequestId(f"{self.request_id}/{choice.index}"),
                params=choice.params,
                choices=(choice,),
                avoid=Blamed(self.avoid),
            )
            for choice in self.choices
            if choice.finish is None
        ]

    def merge(self, branches: "Sequence[RequestRecord]") -> None:
        """Takes what its branches have learnt."""
        self.attempt = max(branch.attempt for branch in branches)
        self.residency = branches[-1].residency or self.residency
        first_ns = [each.first_token_ns for each in (self, *branches) if each.first_token_ns]
        self.first_token_ns = min(first_ns, default=0)
        self.last_token_ns = max(each.last_token_ns for each in (self, *branches))

    def finish(self, now_ns: int, reason: FinishReason | None = None, error: BatonError | None = None) -> Finished:
        """The request's one end; `reason` and `error`: why it came before that of all choices."""
        self.advance(RequestMove.FINISH)
        num_cached = min(self.num_cached_tokens, len(self.prompt_ids))
        usage = Usage(len(self.prompt_ids), self.num_output_tokens, self.attempt, num_cached)
        timings = Timings(
            received_ns=self.received_ns,
            admitted_ns=self.admitted_ns,
            leased_ns=self.leased_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=now_ns,
            ranks=self.ranks,
            width=self.width,
            placement=self.placement,
            residency=self.residency,
        )
        reasons = [choice.finish or reason for choice in self.choices]
        assert None not in reasons, f"request {self.request_id} ends with choices that have not"
        return Finished(tuple(each for each in reasons if each is not None), usage, timings, error)
