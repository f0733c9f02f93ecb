"""Record of how a request's prompt was prefilled: decisions, predictions and measurements.

A prompt is prefilled either by a chain of prefill ranks, each of which computes a range of its tokens, or by the
generation group itself. All classes are frozen dataclasses, so threads may share their objects.
"""

from dataclasses import dataclass

from baton.types import TokenRange


@dataclass(frozen=True)
class Interval:
    """Interval of wall-clock time in unix nanoseconds. `end_ns` is exclusive."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTiming:
    """Measurements of one prefill rank for one request. Times are in unix nanoseconds."""

    rank: int
    tokens: TokenRange
    """Prompt tokens that this rank computed."""
    start_ns: int
    end_ns: int
    wait_s: float
    """Seconds between `start_ns` and `end_ns` in which the rank waited for KV of earlier ranks, or computed other jobs
    together with this one."""
    push_start_ns: int
    push_end_ns: int
    num_bytes_pushed: int
    """Number of bytes of KV that the rank pushed to the generation group."""
    num_bytes_sent: int
    """Number of bytes of KV that the rank sent to the next rank."""
    layers: tuple[Interval, ...]
    """Time intervals in which the layers were computed, one for each layer, including waits."""
    num_messages_sent: int = 0
    """Number of messages with which the rank sent KV to the next rank."""
    send_s: float = 0.0
    """Seconds in which KV was being sent to the next rank. 0 on the last rank."""
    num_bytes_shared: int = 0
    """Number of pushed bytes that were sent through shared memory instead of gRPC. Shared memory is used if the
    generation group's process is on the same node."""

    @property
    def computed_s(self) -> float:
        """Compute time of the rank in seconds. `wait_s` is not included."""
        return (self.end_ns - self.start_ns) / 1e9 - self.wait_s


@dataclass(frozen=True)
class WidthOption:
    """One possible number of ranks for a request's prefill chain, with the predictions that were made when the request
    was placed."""

    width: int
    own_s: float
    """Predicted time in seconds from the request's placement to the end of its prefill. It includes the time in which
    the ranks compute earlier requests."""
    others_s: float
    """Predicted seconds by which this option delays other prompts, summed over these prompts. They are the prompts in
    the prefill group's queue, and an equal number of prompts that are assumed to arrive later."""

    @property
    def cost_s(self) -> float:
        """Total cost of the option in seconds: `own_s` plus `others_s`. The option with the lowest cost is chosen."""
        return self.own_s + self.others_s


@dataclass(frozen=True)
class WidthChoice:
    """Chosen number of ranks of a request's prefill chain, with all options that were compared. The option with the
    lowest `cost_s` is chosen."""

    width: int
    num_ranks: int
    """Number of ranks of the prefill group. The chosen chain may use fewer of them."""
    num_ahead: int
    """Number of the prefill group's running jobs that are served before this request."""
    num_jobs: int
    """Number of all running jobs of the prefill group."""
    options: tuple[WidthOption, ...]
    """All options that were compared, including the chosen one."""

    @property
    def predicted_s(self) -> float | None:
        """Predicted time in seconds from the request's placement to the end of its prefill. None if the chosen number
        of ranks is not among the options."""
        return next((option.own_s for option in self.options if option.width == self.width), None)

    @property
    def reason(self) -> str:
        """Description of the chosen number of ranks and of the predictions for all options, in one line."""
        options = ", ".join(f"{each.width}: {each.own_s:.3f} + {each.others_s:.3f}" for each in self.options)
        place = f"{self.width} of {self.num_ranks} ranks behind {self.num_ahead} of {self.num_jobs} jobs"
        return f"{place}; predicted seconds, own + others', by width: {options}"


@dataclass(frozen=True)
class PlacementTerms:
    """Predicted times, in seconds, for one option to prefill a request. The request is prefilled either by a chain of
    prefill ranks, or by the generation group itself. The time from the request's placement to its first token is the
    sum of all fields except `others_s`, the time by which this option delays other requests."""

    queue_s: float
    """Seconds that the request waits for earlier requests."""
    prefill_s: float
    """Seconds to compute the request's prompt, except its cached tokens."""
    steps_s: float
    """Seconds of the generation group's decode steps that the request waits for before its first token."""
    transfer_s: float
    """Seconds of the KV transfer that do not overlap with the computation of the prompt."""
    others_s: float
    """Seconds by which this option delays the prompts of other requests, summed over these prompts."""
    fetch_s: float = 0.0
    """Seconds to fetch cached KV from the prefix store of another node before the prefill. 0 if nothing is fetched."""

    @property
    def own_s(self) -> float:
        """Predicted time in seconds from the request's placement to its first token: the sum of all fields except
        `others_s`."""
        return sum(seconds for name, seconds in self._terms() if name != "others_s")

    @property
    def cost_s(self) -> float:
        """Total cost of the option in seconds: `own_s` plus `others_s`. The option with the lowest cost is chosen."""
        return self.own_s + self.others_s

    def _terms(self) -> list[tuple[str, float]]:
        return list(vars(self).items())

    def __str__(self) -> str:
        shown = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f}" for name, seconds in self._terms() if seconds)
        return f"{self.cost_s:.3f} ({shown})" if shown else f"{self.cost_s:.3f}"


@dataclass(frozen=True)
class Placement:
    """Decision whether a prefill chain or the generation group itself prefills a request, with the predictions on which
    it is based."""

    reason: str
    """Reason for the decision, as one word.

    If a chain prefills the request, the reason is chain_faster, always (set in the configuration), or not_predicted (no
    prediction exists for the group). If the generation group itself prefills the request, the reason is local_faster,
    never (set in the configuration), prompt_scores (the request asks for prompt logprobs, which chains do not compute),
    no_prefill_groups, or none_ready (no prefill group is ready).
    """
    chain: PlacementTerms | None = None
    """Predicted times if a chain prefills the request. None if they were not predicted."""
    local: PlacementTerms | None = None
    """Predicted times if the generation group itself prefills the request. None if they were not predicted."""

    @property
    def is_local(self) -> bool:
        """True if the generation group itself prefills the request."""
        return self.reason not in ("chain_faster", "always", "not_predicted")

    @property
    def text(self) -> str:
        """Description of the reason and the predicted seconds in one readable line."""
        ways = [f"{name} {terms}" for name, terms in (("chain", self.chain), ("local", self.local)) if terms]
        return f"{self.reason}; predicted seconds: {', '.join(ways)}" if ways else self.reason


@dataclass(frozen=True)
class PrefixFetch:
    """Record of fetching cached KV from the prefix store of another node, before the prefill."""

    source: str
    """Name of a worker group on the node from which the KV was fetched."""
    num_tokens: int
    """Number of tokens whose KV was requested. It includes tokens whose KV was already in the prefix store of the node
    that received the KV."""
    num_bytes: int
    """Number of bytes of KV that were fetched."""
    predicted_s: float
    took_s: float
    shortfall: str = ""
    """Reason, in one line, why not all KV was fetched. Empty if the fetch was complete. After an incomplete fetch, the
    request was placed again."""

    @property
    def text(self) -> str:
        """Description of the fetch in one readable line."""
        end = f"; {self.shortfall}" if self.shortfall else ""
        what = f"cached KV of {self.num_tokens} tokens from {self.source}: {self.num_bytes / 2**20:.1f} MiB fetched"
        return f"{what} in {self.took_s:.3f} s, predicted {self.predicted_s:.3f} s{end}"


@dataclass(frozen=True)
class PrefillTrace:
    """Record of how a request's prompt was prefilled: the server's decisions, predictions and measurements. It is meant
    for tuning a cluster. Its fields may change in any version."""

    placement: Placement | None = None
    """Decision whether a prefill chain or the generation group itself prefills the request, with its reason. None if
    the request was not placed."""
    width: WidthChoice | None = None
    """Chosen number of prefill ranks, with its reason. None if the generation group itself prefilled the request."""
    ranks: tuple[RankTiming, ...] = ()
    """Timings of the ranks in the prefill chain. Empty if the generation group itself prefilled the request."""
    fetch: PrefixFetch | None = None
    """Last attempt to fetch cached KV from another node. None if there was no attempt."""
