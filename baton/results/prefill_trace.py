"""Values that show how a request's prompt was prefilled: decisions, predictions and measurements. All are frozen and
safe to share between threads."""

from dataclasses import dataclass

from baton.types import TokenRange


@dataclass(frozen=True)
class Interval:
    """Wall-clock time [start_ns, end_ns) in unix nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTiming:
    """One prefill rank's part of a request; instants in unix nanoseconds."""

    rank: int
    tokens: TokenRange
    """Prompt tokens that this rank computed."""
    start_ns: int
    end_ns: int
    wait_s: float
    """Seconds between `start_ns` and `end_ns` that were spent waiting for earlier ranks' KV."""
    push_start_ns: int
    push_end_ns: int
    num_bytes_pushed: int
    """Bytes of KV sent to the generation group."""
    num_bytes_sent: int
    """Bytes of KV passed on to the next rank."""
    layers: tuple[Interval, ...]
    """When each layer was computed, waits included."""
    num_messages_sent: int = 0
    """Messages in which the bytes for the next rank were sent."""
    send_s: float = 0.0
    """Seconds during which bytes for the next rank were on their way; 0 on the last rank."""
    num_bytes_shared: int = 0
    """Pushed bytes that went through memory shared with the generation group's process, instead of gRPC."""


@dataclass(frozen=True)
class WidthOption:
    """A number of ranks that a request could have had, with the predictions made when the request was placed."""

    width: int
    own_s: float
    """Seconds to the prompt's end, including the time in which its ranks serve other requests first."""
    others_s: float
    """Seconds that this width would cost other prompts, in sum: those in flight, and the same number of later ones."""

    @property
    def cost_s(self) -> float:
        """The predicted cost in seconds, own and others' added up: the chosen width has the least."""
        return self.own_s + self.others_s


@dataclass(frozen=True)
class WidthChoice:
    """Number of ranks that a request got, and the options that it was chosen from by the least `cost_s`."""

    width: int
    num_ranks: int
    """Ranks of the prefill group."""
    num_ahead: int
    """Jobs of the group in flight that were to be served before this one."""
    num_jobs: int
    """All jobs of the prefill group that were in flight."""
    options: tuple[WidthOption, ...]
    """All widths that were compared, the chosen one included."""

    @property
    def predicted_s(self) -> float | None:
        """Seconds from placement to the prompt's end; None when the chosen width is not among the options."""
        return next((option.own_s for option in self.options if option.width == self.width), None)

    @property
    def reason(self) -> str:
        """The choice and its predictions in one line for people."""
        options = ", ".join(f"{each.width}: {each.own_s:.3f} + {each.others_s:.3f}" for each in self.options)
        place = f"{self.width} of {self.num_ranks} ranks behind {self.num_ahead} of {self.num_jobs} jobs"
        return f"{place}; predicted seconds, own + others', by width: {options}"


@dataclass(frozen=True)
class PlacementTerms:
    """Predicted parts of the time from a request's placement to its first token, for one option to prefill it."""

    queue_s: float
    """Seconds in which others are served before this request."""
    prefill_s: float
    """Seconds of computing the request's own prompt, without its cached tokens."""
    steps_s: float
    """Seconds in which the generation group takes decode steps meanwhile."""
    transfer_s: float
    """Seconds of KV transfer, beyond what overlaps with computing."""
    others_s: float
    """Seconds that this option costs other prompts, in sum."""
    fetch_s: float = 0.0
    """Seconds of fetching cached KV from another node's prefix store, before the prefill."""

    @property
    def own_s(self) -> float:
        """Predicted seconds from placement to the first token: the sum of all terms except `others_s`."""
        return sum(seconds for name, seconds in self._terms() if name != "others_s")

    @property
    def cost_s(self) -> float:
        """The predicted cost in seconds, own and others' added up: the chosen option has the least."""
        return self.own_s + self.others_s

    def _terms(self) -> list[tuple[str, float]]:
        return list(vars(self).items())

    def __str__(self) -> str:
        shown = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f}" for name, seconds in self._terms() if seconds)
        return f"{self.cost_s:.3f} ({shown})" if shown else f"{self.cost_s:.3f}"


@dataclass(frozen=True)
class Placement:
    """Choice between a chain and the generation group itself to prefill a request, with its reason."""

    reason: str
    """Reason in one word. For a chain: chain_faster, always (as configured), not_predicted (no prediction for the
    group). For the group: local_faster, never (as configured), prompt_scores, no_prefill_groups, none_ready."""
    chain: PlacementTerms | None = None
    """Prediction for a chain; None if nothing was predicted."""
    local: PlacementTerms | None = None
    """Prediction for the generation group's own prefill; None if nothing was predicted."""

    @property
    def is_local(self) -> bool:
        """True if the generation group itself prefilled the request."""
        return self.reason not in ("chain_faster", "always", "not_predicted")

    @property
    def text(self) -> str:
        """The reason and the predictions in one line for people."""
        ways = [f"{name} {terms}" for name, terms in (("chain", self.chain), ("local", self.local)) if terms]
        return f"{self.reason}; predicted seconds: {', '.join(ways)}" if ways else self.reason


@dataclass(frozen=True)
class PrefixFetch:
    """A fetch of cached KV from the prefix store of another node, before the prefill."""

    source: str
    """Name of a group of the node that had the KV."""
    num_tokens: int
    """Tokens whose KV was to be fetched, including tokens whose KV the target had by then."""
    num_bytes: int
    """Bytes of KV that were fetched."""
    predicted_s: float
    took_s: float
    shortfall: str = ""
    """Reason in one line why the fetch was incomplete, so that the request was placed again; empty if it was complete.
    """

    @property
    def text(self) -> str:
        """The fetch in one line for people."""
        end = f"; {self.shortfall}" if self.shortfall else ""
        what = f"cached KV of {self.num_tokens} tokens from {self.source}: {self.num_bytes / 2**20:.1f} MiB fetched"
        return f"{what} in {self.took_s:.3f} s, predicted {self.predicted_s:.3f} s{end}"


@dataclass(frozen=True)
class PrefillTrace:
    """How a request's prompt was prefilled: decisions, predictions and measurements of the server. Meant for tuning a
    cluster: its fields may change with any version."""

    placement: Placement | None = None
    """Where the request was prefilled, and why; None when it was not placed."""
    width: WidthChoice | None = None
    """How many prefill ranks were chosen, and why; None when the generation group prefilled by itself."""
    ranks: tuple[RankTiming, ...] = ()
    """Timings of the chain's ranks; empty when the generation group prefilled by itself."""
    fetch: PrefixFetch | None = None
    """The last fetch of cached KV from another node; None when none was tried."""
