"""What a client gets back besides tokens, as values. All are frozen and safe to share between threads."""

from dataclasses import dataclass

from baton.types import FinishReason, SampledToken, TokenRange


@dataclass(frozen=True)
class Usage:
    """What a request took."""

    num_prompt_tokens: int
    num_output_tokens: int
    """All of the stream's tokens, of all choices, those before a resumption included."""
    num_attempts: int
    """Attempts of the server at the request, since it last took it up."""
    num_cached_tokens: int = 0
    """Prompt tokens that the last attempt did not compute, as an earlier prompt that begins alike had left their KV."""


@dataclass(frozen=True)
class Interval:
    """Wall-clock time [start_ns, end_ns) in unix nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTiming:
    """One prefill rank's part of a request; instants as in Timings."""

    rank: int
    tokens: TokenRange
    """Prompt tokens that this rank computed."""
    start_ns: int
    end_ns: int
    wait_s: float
    """Seconds between the two spent waiting for earlier ranks' KV."""
    push_start_ns: int
    push_end_ns: int
    num_bytes_pushed: int
    """KV sent to the generation group."""
    num_bytes_sent: int
    """KV passed on to the next rank."""
    layers: tuple[Interval, ...]
    """One a layer: compute, waits included."""
    num_messages_sent: int = 0
    """That these bytes went in."""
    send_s: float = 0.0
    """Seconds in which they were on their way; 0 on the last rank."""


@dataclass(frozen=True)
class WidthOption:
    """A number of ranks that a request could have had, with what was predicted for it when it was placed."""

    width: int
    own_s: float
    """Seconds to the prompt's end, those included in which its ranks serve others first."""
    others_s: float
    """Seconds that it would cost other prompts, in sum: those in flight, and as many yet to come."""

    @property
    def cost_s(self) -> float:
        """What is to be least."""
        return self.own_s + self.others_s


@dataclass(frozen=True)
class WidthChoice:
    """How many ranks a request got, and why: of `options`, the one that costs least."""

    width: int
    num_ranks: int
    """Of the group."""
    num_ahead: int
    """Jobs of the group that were to be served first, of those in flight."""
    num_jobs: int
    """Jobs of the group in flight."""
    options: tuple[WidthOption, ...]
    """The chosen one included."""

    @property
    def predicted_s(self) -> float | None:
        """Seconds from placement to the prompt's end; None when the chosen width is not among the options."""
        return next((option.own_s for option in self.options if option.width == self.width), None)

    @property
    def reason(self) -> str:
        """One line for people."""
        options = ", ".join(f"{each.width}: {each.own_s:.3f} + {each.others_s:.3f}" for each in self.options)
        place = f"{self.width} of {self.num_ranks} ranks behind {self.num_ahead} of {self.num_jobs} jobs"
        return f"{place}; predicted seconds, own + others', by width: {options}"


@dataclass(frozen=True)
class PlacementTerms:
    """What was predicted of one way to prefill a request, in seconds to its first token from when it was placed."""

    queue_s: float
    """Others are served before it."""
    prefill_s: float
    """Its own prompt, without what is cached of it."""
    steps_s: float
    """The generation group decodes in between."""
    transfer_s: float
    """KV is on its way, beyond what overlaps with computing it."""
    others_s: float
    """What it costs other prompts, in sum."""

    @property
    def own_s(self) -> float:
        """Seconds to the first token."""
        return self.queue_s + self.prefill_s + self.steps_s + self.transfer_s

    @property
    def cost_s(self) -> float:
        """What is to be least."""
        return self.own_s + self.others_s

    def __str__(self) -> str:
        parts = [("queue", self.queue_s), ("prefill", self.prefill_s), ("steps", self.steps_s)]
        parts += [("transfer", self.transfer_s), ("others", self.others_s)]
        shown = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts if seconds)
        return f"{self.cost_s:.3f} ({shown})" if shown else f"{self.cost_s:.3f}"


@dataclass(frozen=True)
class Placement:
    """Where a request was prefilled, by a chain or by its generation group itself, and why."""

    reason: str
    """By a chain: chain_faster, always (as configured), not_predicted (nobody knows what the group would take). By the
    group: local_faster, never (as configured), prompt_scores, no_prefill_groups, none_ready."""
    chain: PlacementTerms | None = None
    """None where it was not asked."""
    local: PlacementTerms | None = None
    """Likewise, of the generation group."""

    @property
    def is_local(self) -> bool:
        """Whether the generation group prefilled."""
        return self.reason not in ("chain_faster", "always", "not_predicted")

    @property
    def text(self) -> str:
        """One line for people."""
        ways = [f"{name} {terms}" for name, terms in (("chain", self.chain), ("local", self.local)) if terms]
        return f"{self.reason}; predicted seconds: {', '.join(ways)}" if ways else self.reason


@dataclass(frozen=True)
class Timings:
    """Wall-clock instants on the server, of its last attempt, in unix nanoseconds; 0 for what did not happen."""

    received_ns: int
    admitted_ns: int
    """Left the queue."""
    leased_ns: int
    """Got a slot."""
    first_token_ns: int
    finished_ns: int
    ranks: tuple[RankTiming, ...]
    width: WidthChoice | None = None
    """Why it was these ranks; None when the generation group prefilled by itself."""
    placement: Placement | None = None
    """Where it was prefilled; None when it was not placed."""
    residency: str = ""
    """The residency policy of the generation group: which KV is attended to; empty when it had none."""

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None if there was none."""
        return (self.first_token_ns - self.received_ns) / 1e9 if self.first_token_ns else None


@dataclass(frozen=True)
class Choice:
    """One of a request's outputs: all of it after its end, so far before."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    """Why it ended; None while it runs."""


@dataclass(frozen=True)
class Completion:
    """A stream's output: all of it after the end, so far before."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt: tuple[SampledToken, ...]
    """The prompt's tokens with their logprobs, if these were asked for."""
    model: str
    """The model's name; empty before the server took the request."""
    seed: int | None
    """What, with prompt and parameters, gives the same tokens again; None before the server took the request."""
    exact: bool | None
    """True: full attention and coupled sampling all the way. False: some tokens may be an approximate policy's
    (`timings.residency`). None before the server took the request."""
    num_prompt_tokens: int | None
    """None before the server took the request."""
    usage: Usage | None
    """From the server's last message: None before it, and in streams that end without one."""
    timings: Timings | None
    """Likewise."""
    num_resumes: int
    """How often the client took the stream up again after losing the server."""

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """The first choice's."""
        return self.choices[0].tokens

    @property
    def finish(self) -> FinishReason | None:
        """Why the first choice ended; None while it runs."""
        return self.choices[0].finish


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served, and its limits."""

    name: str
    max_tokens: int
    """Prompt and output together, at most."""
    vocab_size: int
    dtype: str
    has_chat_template: bool
    layout_fingerprint: str
    """Equal where KV is stored alike (KvLayout.fingerprint)."""


@dataclass(frozen=True)
class KvLedger:
    """A generation group's KV memory at home, by the state of the slots that it is promised to."""

    num_bytes: int = 0
    """The capacity; 0: unknown."""
    num_bytes_free: int = 0
    """Promised to no slot."""
    num_bytes_leased: int = 0
    """Where KV is pushed, or waits for its row."""
    num_bytes_active: int = 0
    """Of rows of the batch."""
    num_bytes_quarantined: int = 0
    """Of slots that were freed while a writer was inside."""

    @property
    def num_bytes_taken(self) -> int:
        """Promised to some slot."""
        return self.num_bytes_leased + self.num_bytes_active + self.num_bytes_quarantined

    @property
    def imbalance(self) -> str:
        """What does not balance, for people; empty when the parts are the whole."""
        free, taken = self.num_bytes_free, self.num_bytes_taken
        if free >= 0 and free + taken == self.num_bytes:
            return ""
        return f"{free} bytes free and {taken} promised are not the {self.num_bytes} of KV"


@dataclass(frozen=True)
class PrefixHoldings:
    """What the prefix store of a group's node holds: groups of one node, of either role, share one."""

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    """That it may hold; 0: there is none."""
    num_bytes_read: int = 0
    """That the generation group's slots got from there, since its worker began."""
    num_disk_bytes_read: int = 0
    """Of these, from disk."""
    num_bytes_stored: int = 0
    """That its answers brought there."""


@dataclass(frozen=True)
class GroupState:
    """One group of workers, as the orchestrator sees it."""

    name: str
    role: str
    """prefill or generate."""
    endpoints: tuple[str, ...]
    """host:port of each rank."""
    epoch: int
    is_ready: bool
    num_slots: int
    num_free: int
    num_bytes_held: int
    num_leaked: int
    """Slots or jobs held by no request that the orchestrator knows, for over 2 s."""
    num_requests: int
    """Requests of this orchestrator that the group serves."""
    num_leased: int = 0
    """Slots that are claimed and not yet rows of the batch."""
    num_active: int = 0
    """Slots that are rows."""
    num_quarantined: int = 0
    """Slots that were freed while a writer was inside."""
    kv: KvLedger = KvLedger()
    num_preemptions: int = 0
    """Rows so far that gave their memory to older ones, and were prefilled again."""
    imbalance: str = ""
    """What of slots and bytes does not balance, for people; empty when all does."""
    is_drained: bool = False
    """Whether it gets no new work because somebody said so."""
    is_broken: bool = False
    """Whether it gets none for a while because attempts there failed again and again."""
    prefixes: PrefixHoldings = PrefixHoldings()
    residency: str = ""
    """Of a generation group: its residency policy."""
    is_approximate: bool = False
    """Whether that attends to less than all tokens."""
    processors: tuple[str, ...] = ()
    """Kinds of processor that its workers run on, each with the kernels in use there."""


@dataclass(frozen=True)
class ClusterState:
    """Groups, queue and slots, as the orchestrator sees them."""

    groups: tuple[GroupState, ...]
    num_queued: int
    num_running: int
    num_degraded: int
    """Requests so far whose generation group prefilled by itself because no prefill group was ready."""
    version: str
    num_queued_tokens: int = 0
    """Prompt tokens of the requests that wait."""
    why_not_serving: tuple[str, ...] = ()
    """Why health says NOT_SERVING, a line each; empty while it serves."""
    why_degraded: tuple[str, ...] = ()
    """Why it serves worse than it could, likewise."""
    metrics_endpoint: str = ""
    """host:port at which Prometheus finds /metrics; empty when there is none."""
