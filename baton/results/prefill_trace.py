"""Values that show how a request's prompt was prefilled: decisions, predictions and measurements. A prompt is prefilled
by a chain of prefill ranks, each of which computes a range of its tokens, or by the generation group itself. All values
are frozen, so threads may share them."""

from dataclasses import dataclass

from baton.types import TokenRange


@dataclass(frozen=True)
class Interval:
    """Wall-clock time [start_ns, end_ns) in unix nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTiming:
    """One prefill rank's work for a request. Instants are in unix nanoseconds."""

    rank: int
    tokens: TokenRange
    """Prompt tokens that this rank computed."""
    start_ns: int
    end_ns: int
    wait_s: float
    """Seconds of the time from `start_ns` to `end_ns` that the rank waited for the KV of earlier ranks."""
    push_start_ns: int
    push_end_ns: int
    num_bytes_pushed: int
    """Number of bytes of KV that the rank pushed to the generation group."""
    num_bytes_sent: int
    """Number of bytes of KV that the rank sent to the next rank."""
    layers: tuple[Interval, ...]
    """Time interval in which each layer was computed, including waits."""
    num_messages_sent: int = 0
    """Number of messages with which the rank sent KV to the next rank."""
    send_s: float = 0.0
    """Seconds during which KV was in transfer to the next rank; 0 on the last rank."""
    num_bytes_shared: int = 0
    """Number of pushed bytes that were transferred through memory shared with the generation group's process instead of
    gRPC."""


@dataclass(frozen=True)
class WidthOption:
    """One possible width of a request's chain (a number of ranks), with the predictions made when the request was
    placed."""

    width: int
    own_s: float
    """Predicted seconds until the end of the request's prefill, including the time in which the ranks serve earlier
    requests."""
    others_s: float
    """Predicted total delay, in seconds, of other prompts: those in flight, and an equal number of later ones."""

    @property
    def cost_s(self) -> float:
        """Predicted total cost in seconds: `own_s` plus `others_s`. The option with the lowest cost is chosen."""
        return self.own_s + self.others_s


@dataclass(frozen=True)
class WidthChoice:
    """Number of ranks that a request's chain has, and all options that were compared. The option with the lowest
    `cost_s` is chosen."""

    width: int
    num_ranks: int
    """Number of ranks of the prefill group."""
    num_ahead: int
    """Number of the prefill group's jobs in flight that were to be served before this request."""
    num_jobs: int
    """Number of all jobs of the prefill group that were in flight."""
    options: tuple[WidthOption, ...]
    """All options that were compared, including the chosen one."""

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds from placement to the end of the prefill; None when the chosen width is not among the
        options."""
        return next((option.own_s for option in self.options if option.width == self.width), None)

    @property
    def reason(self) -> str:
        """The chosen width and the predictions for all widths, in one readable line."""
        options = ", ".join(f"{each.width}: {each.own_s:.3f} + {each.others_s:.3f}" for each in self.options)
        place = f"{self.width} of {self.num_ranks} ranks behind {self.num_ahead} of {self.num_jobs} jobs"
        return f"{place}; predicted seconds, own + others', by width: {options}"


@dataclass(frozen=True)
class PlacementTerms:
    """Predicted terms of the time from a request's placement to its first token, for one option: prefill by a chain, or
    by the generation group itself."""

    queue_s: float
    """Seconds in which earlier requests are served before this one."""
    prefill_s: float
    """Seconds to compute the request's own prompt, without its cached tokens."""
    steps_s: float
    """Seconds of decode steps that the generation group runs before the first token."""
    transfer_s: float
    """Seconds of KV transfer that do not overlap with computing."""
    others_s: float
    """Total delay, in seconds, that this option causes for other prompts."""
    fetch_s: float = 0.0
    """Seconds to fetch cached KV from another node's prefix store, before the prefill."""

    @property
    def own_s(self) -> float:
        """Predicted seconds from placement to the first token: the sum of all terms except `others_s`."""
        return sum(seconds for name, seconds in self._terms() if name != "others_s")

    @property
    def cost_s(self) -> float:
        """Predicted total cost in seconds: `own_s` plus `others_s`. The option with the lowest cost is chosen."""
        return self.own_s + self.others_s

    def _terms(self) -> list[tuple[str, float]]:
        return list(vars(self).items())

    def __str__(self) -> str:
        shown = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f}" for name, seconds in self._terms() if seconds)
        return f"{self.cost_s:.3f} ({shown})" if shown else f"{self.cost_s:.3f}"


@dataclass(frozen=True)
class Placement:
    """Decision whether a chain or the generation group itself prefills a request, with its reason."""

    reason: str
    """Reason in one word. If a chain prefills: chain_faster, always (as configured), not_predicted (no prediction for
    the group). If the generation group prefills: local_faster, never (as configured), prompt_scores, no_prefill_groups,
    none_ready."""
    chain: PlacementTerms | None = None
    """Prediction for prefill by a chain; None if nothing was predicted."""
    local: PlacementTerms | None = None
    """Prediction for prefill by the generation group itself; None if nothing was predicted."""

    @property
    def is_local(self) -> bool:
        """True if the generation group itself prefills the request."""
        return self.reason not in ("chain_faster", "always", "not_predicted")

    @property
    def text(self) -> str:
        """The reason and the predictions in one readable line."""
        ways = [f"{name} {terms}" for name, terms in (("chain", self.chain), ("local", self.local)) if terms]
        return f"{self.reason}; predicted seconds: {', '.join(ways)}" if ways else self.reason


@dataclass(frozen=True)
class PrefixFetch:
    """A fetch of cached KV from the prefix store of another node, before the prefill."""

    source: str
    """Name of a group on the node from which the KV was fetched."""
    num_tokens: int
    """Number of tokens whose KV was requested. It includes tokens whose KV the target node already had when the fetch
    began."""
    num_bytes: int
    """Number of bytes of KV that were fetched."""
    predicted_s: float
    took_s: float
    shortfall: str = ""
    """Reason, in one line, why the fetch was incomplete. The request was then placed again. Empty if the fetch was
    complete."""

    @property
    def text(self) -> str:
        """Description of the fetch in one readable line."""
        end = f"; {self.shortfall}" if self.shortfall else ""
        what = f"cached KV of {self.num_tokens} tokens from {self.source}: {self.num_bytes / 2**20:.1f} MiB fetched"
        return f"{what} in {self.took_s:.3f} s, predicted {self.predicted_s:.3f} s{end}"


@dataclass(frozen=True)
class PrefillTrace:
    """Record of how a request's prompt was prefilled: the server's decisions, predictions and measurements. Meant for
    tuning a cluster. Its fields may change with any version."""

    placement: Placement | None = None
    """Decision where the request was prefilled, with its reason; None when the request was not placed."""
    width: WidthChoice | None = None
    """Number of prefill ranks that was chosen, with its reason; None when the generation group prefilled by itself."""
    ranks: tuple[RankTiming, ...] = ()
    """Timings of the chain's ranks; empty when the generation group prefilled by itself."""
    fetch: PrefixFetch | None = None
    """Last fetch of cached KV from another node; None when none was attempted."""
