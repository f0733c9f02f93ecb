"""Cost model: the cost of a prefill layer on one rank, and of a message on a link. All predictions are computed from
it.

  linear_s   seconds for the matrix products of one token in a layer
  pair_s     seconds for the attention of one (query, key) pair in a layer
  fixed_s    seconds that every chunk adds to a layer
  issue_s    minimum seconds of a layer: the time that the host needs to launch the layer's kernels
  kv_bytes   bytes of one token's K and V in a layer
  link       latency in seconds and bandwidth in bytes per second

The values are derived from a model's shape and the rates of the hardware (`baton.planning.hardware`), and corrected by
finished jobs (`baton.planning.prefill_costs`). docs/kv_runahead.md calls linear_s and pair_s a and b. All functions
are pure.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from baton.errors import ConfigError


@dataclass(frozen=True)
class LinkModel:
    """Link from one rank to the next, which is full-duplex: its latency and its bandwidth in each direction."""

    latency_s: float = 0.0
    """Latency in seconds: the part of a message's duration that does not depend on its size."""
    bandwidth: float = math.inf
    """Bandwidth in bytes per second in one direction."""

    def __post_init__(self) -> None:
        _at_least_zero("link", "latency_s", self.latency_s)
        if not self.bandwidth > 0:
            raise ConfigError(f"link: bandwidth = {self.bandwidth} is out of range: give bytes a second above 0")

    def seconds(self, num_bytes: float) -> float:
        """Return the time in seconds that a message of `num_bytes` bytes takes on an idle link."""
        return self.latency_s + num_bytes / self.bandwidth

    def times(self, factor: float) -> "LinkModel":
        """Return a link on which every message takes `factor` times as long as on this link."""
        return LinkModel(self.latency_s * factor, self.bandwidth / factor)


@dataclass(frozen=True)
class CostModel:
    """Costs of one model on one kind of rank and link. Times are in seconds. `linear_s`, `pair_s`, `fixed_s`, `issue_s`
    and `copy_s` are times of one layer. `head_s` is a time of a whole request."""

    num_layers: int
    linear_s: float
    pair_s: float
    kv_bytes: int
    project_share: float = 0.25
    """Fraction of a layer's matrix products that must be computed before the chunk's KV can be sent. These products are
    the query, key and value projections."""
    fixed_s: float = 0.0
    issue_s: float = 0.0
    head_s: float = 0.0
    """Seconds in which the last token's logits are computed."""
    copy_s: float = 0.0
    """Seconds to copy the KV of one token in one layer. The KV is copied only by protocols that need it
    contiguous. Baton's protocol does not copy KV."""
    link: LinkModel = field(default_factory=LinkModel)
    push: LinkModel | None = None
    """Link from each rank to the generation group, over which KV is pushed. None: the time of pushing KV is not
    predicted."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"cost: num_layers = {self.num_layers} is out of range: give at least 1")
        if not 0 <= self.project_share <= 1:
            raise ConfigError(f"cost: project_share = {self.project_share} is out of range: give 0 to 1")
        for name in ("linear_s", "pair_s", "kv_bytes", "fixed_s", "issue_s", "head_s", "copy_s"):
            _at_least_zero("cost", name, getattr(self, name))
        if not self.linear_s + self.pair_s > 0:
            raise ConfigError("cost: linear_s and pair_s are both 0: give one of them above 0")


class Kernel(Enum):
    """Kind of attention kernel. The kinds differ in the (query, key) pairs that they compute. The queries are those of
    the rank's chunk. The keys are all keys up to the end of the chunk."""

    DENSE = "dense"
    """All (query, key) pairs are computed. Pairs whose key is after the query are masked afterwards, as in the
    KV-Runahead paper."""
    CAUSAL = "causal"
    """Only (query, key) pairs whose key is the query's own key or an earlier one are computed, as in Baton."""

    @property
    def own_part(self) -> float:
        """Fraction of the pairs within the rank's own chunk that the kernel computes: 1 for DENSE, 0.5 for CAUSAL."""
        return 1.0 if self is Kernel.DENSE else 0.5


class Receive(Enum):
    """Time at which a rank receives the KV of earlier ranks for a layer."""

    BLOCKING = "blocking"
    """A rank receives the KV of earlier ranks before it begins the layer, and sends its own KV afterwards (table 5 of
    the KV-Runahead paper)."""
    OVERLAPPED = "overlapped"
    """A rank receives the KV of earlier ranks while it computes. It needs this KV after its projections, before any
    attention (section 4.3 of the KV-Runahead paper)."""
    LOCAL_FIRST = "local_first"
    """A rank receives the KV of earlier ranks while it computes. It needs this KV only after its projections and the
    attention to its own chunk. Baton's prefill workers use this order."""


@dataclass(frozen=True)
class Protocol:
    """Order of computing, receiving and sending in a prefill chain. It does not depend on the hardware."""

    kernel: Kernel
    receive: Receive
    cut_through: bool = False
    """True: each rank's chunk is a separate message, and the next rank forwards it as soon as it arrives. False: a rank
    sends the KV of a layer as one message, together with the KV of earlier ranks."""
    skip_last: bool = True
    """True: in the last layer, the KV of all tokens is computed, but only the output of the last token. False: the
    outputs of all tokens are computed."""
    num_copies: int = 0
    """Number of times that a rank copies the KV of a layer before it sends the KV."""


BATON = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST, cut_through=True)
"""Protocol of Baton's prefill workers (`prefill_workers`). The real workers relay KV in smaller pieces than this model
assumes."""


def _at_least_zero(where: str, name: str, value: float) -> None:
    if not value >= 0 or value == math.inf:
        raise ConfigError(f"{where}: {name} = {value} is out of range: give a number of at least 0")
