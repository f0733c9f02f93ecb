"""The cost model: costs of a prefill layer on one rank and of a message on a link. All predictions are made of it.

  linear_s   a token through a layer's matrices            fixed_s   a layer, for any chunk (adds)
  pair_s     a (query, key) pair in a layer                issue_s   a layer's kernels, issued by the host while the
  kv_bytes   a token's K and V in a layer                            device runs behind (a floor, does not add)
  link       seconds before the first byte, bytes a second

The numbers are measured per model and machine (`baton.planning.fit`), or derived from a shape and a hardware's rates
(`baton.planning.hardware`). Symbols are those of docs/kv_runahead.md, where a and b are linear_s and pair_s. Pure.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from enum import Enum

from baton.errors import ConfigError

COSTS = ("linear_s", "pair_s", "fixed_s", "issue_s", "head_s", "copy_s")
"""Names of the fields of CostModel whose unit is seconds."""


@dataclass(frozen=True)
class LinkModel:
    """Full-duplex connection from one rank to the next: latency and bandwidth."""

    latency_s: float = 0.0
    """Seconds that a message takes in addition to the transfer of its bytes."""
    bandwidth: float = math.inf
    """Bytes a second in one direction."""

    def __post_init__(self) -> None:
        _at_least_zero("link", "latency_s", self.latency_s)
        if not self.bandwidth > 0:
            raise ConfigError(f"link: bandwidth = {self.bandwidth} is out of range: give bytes a second above 0")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that one message of `num_bytes` takes on an idle link."""
        return self.latency_s + num_bytes / self.bandwidth

    def times(self, factor: float) -> "LinkModel":
        """Return a link on which every message takes `factor` times as long."""
        return LinkModel(self.latency_s * factor, self.bandwidth / factor)


@dataclass(frozen=True)
class CostModel:
    """Costs of one model on one kind of rank and link. Times in seconds; all except head_s are per layer."""

    num_layers: int
    linear_s: float
    pair_s: float
    kv_bytes: int
    project_share: float = 0.25
    """Fraction of a layer's linear time (the query, key and value projections) that must pass before a chunk's KV can
    be sent."""
    fixed_s: float = 0.0
    issue_s: float = 0.0
    head_s: float = 0.0
    """Seconds to compute the last token's logits. If measured while serving, all seconds of a request in addition to
    its chain."""
    copy_s: float = 0.0
    """Seconds to copy one token's KV in one layer, for protocols that need contiguous KV. Baton's protocol does not."""
    link: LinkModel = field(default_factory=LinkModel)
    push: LinkModel | None = None
    """Link from each rank to the generation group. None: the time to push KV is not predicted."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(f"cost: num_layers = {self.num_layers} is out of range: give at least 1")
        if not 0 <= self.project_share <= 1:
            raise ConfigError(f"cost: project_share = {self.project_share} is out of range: give 0 to 1")
        for name in ("linear_s", "pair_s", "kv_bytes", "fixed_s", "issue_s", "head_s", "copy_s"):
            _at_least_zero("cost", name, getattr(self, name))
        if not self.linear_s + self.pair_s > 0:
            raise ConfigError("cost: linear_s and pair_s are both 0: measure again, with longer prompts")

    def times(self, factor: float) -> "CostModel":
        """Return costs with all times multiplied by `factor`, including those of links. The best partition does not
        change."""
        slower = {name: factor * getattr(self, name) for name in COSTS}
        push = None if self.push is None else self.push.times(factor)
        return dataclasses.replace(self, link=self.link.times(factor), push=push, **slower)


class Kernel(Enum):
    """Query-key pairs that attention computes, among the rectangle of a rank's queries and all keys before its end."""

    DENSE = "dense"
    """The whole rectangle, masked afterwards, as in the KV-Runahead paper."""
    CAUSAL = "causal"
    """The rectangle without the upper half of the square of the rank's own queries and keys, as in Baton."""

    @property
    def own_part(self) -> float:
        """Fraction that is computed of the square of a rank's own queries and keys."""
        return 1.0 if self is Kernel.DENSE else 0.5


class Receive(Enum):
    """Time at which a rank receives the earlier tokens' KV of a layer."""

    BLOCKING = "blocking"
    """The KV is received before the rank begins the layer, and only then sent (table 5 of the KV-Runahead paper)."""
    OVERLAPPED = "overlapped"
    """The receive is posted early. The KV is needed after the projections (section 4.3 of the KV-Runahead paper)."""
    LOCAL_FIRST = "local_first"
    """The receive is posted early. The KV is needed after the projections and the attention to the rank's own chunk, as
    in Baton."""


@dataclass(frozen=True)
class Protocol:
    """Protocol of a chain, independent of the hardware."""

    kernel: Kernel
    receive: Receive
    cut_through: bool = False
    """True: each rank's chunk is a message, which the next rank passes on when it arrives. False: all KV of a layer is
    one message."""
    skip_last: bool = True
    """True: of the last layer, only the KV and the last token's output are computed."""
    num_copies: int = 0
    """Number of times that a rank rewrites a layer's KV before it sends it."""


BATON = Protocol(Kernel.CAUSAL, Receive.LOCAL_FIRST, cut_through=True)
"""Protocol of `prefill_workers`. Their relay sends smaller pieces than the chunks assumed here."""


def _at_least_zero(where: str, name: str, value: float) -> None:
    if not value >= 0 or value == math.inf:
        raise ConfigError(f"{where}: {name} = {value} is out of range: give a number of at least 0")
